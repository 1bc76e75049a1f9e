// `onescale verify --against FILE`: another trainer's gradients beside ours, and what is likely wrong with them.
#pragma once

#include <optional>

#include "train/verify.h"

namespace onescale {

// Prints, by group of parameters, ratio, residual and the likeliest cause; 0 when all agree, else 1. FILE holds tensors
// by Hugging Face name, with or without "grad." and "transformer.", and may hold "grad_norm" and "loss". Every rank of
// `world` calls it; the options' layout is that of our own step.
int verify_against(const Options& options, Communicator& world);

// Why every gradient could be `ratio` times too large, as text; empty where nothing known gives this number.
std::string cause_of_factor(double ratio, const HostBatch& batch, double norm, double tolerance);
// Why a norm could be `theirs` over gradients that are right; empty where it is right or nothing explains it.
std::string cause_of_norm(double theirs, const ModelConfig& config, const WholeTensors& exact, double tolerance);

}  // namespace onescale
