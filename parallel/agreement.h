// Failures that all ranks throw alike, and texts that they show each other.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace onescale {

// Every rank's text, by rank. Collective.
std::vector<std::string> exchange_text(Communicator& world, const std::string& mine);

// Runs `work` on every rank, or on rank 0 alone; where it throws on any rank, every rank throws UsageError or Error
// with the sentence of the lowest. `work` must not communicate after a point at which it can fail. Collective.
void together(Communicator& world, const std::function<void()>& work);
void on_root(Communicator& world, const std::function<void()>& work);

}  // namespace onescale
