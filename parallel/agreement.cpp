#include "parallel/agreement.h"

#include <algorithm>

#include "kernels/error.h"

namespace onescale {

std::vector<std::string> exchange_text(Communicator& world, const std::string& mine) {
  const std::vector<std::int64_t> sizes = world.exchange(static_cast<std::int64_t>(mine.size()));
  const std::size_t most = index(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = mine, all(most * sizes.size(), '\0');
  padded.resize(most);
  if (most > 0) world.exchange(all.data(), padded.data(), std::ssize(padded));
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < sizes.size(); ++r) texts.push_back(all.substr(r * most, index(sizes[r])));
  return texts;
}

void together(Communicator& world, const std::function<void()>& work) {
  std::string failure;  // "u" or "e" and the sentence
  try {
    work();
  } catch (const UsageError& error) {
    failure = str("u", error.what());
  } catch (const std::exception& error) {
    failure = str("e", error.what());
  }
  for (const std::string& text : exchange_text(world, failure)) {
    if (text.empty()) continue;
    check_usage(text[0] != 'u', text.substr(1));
    throw Error(text.substr(1));
  }
}

void on_root(Communicator& world, const std::function<void()>& work) {
  together(world, [&] {
    if (world.rank() == 0) work();
  });
}

}  // namespace onescale
