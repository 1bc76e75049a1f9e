// GPTBigCode's loss and updates as the papers write them, in float64 loops: what `onescale verify` holds the trainer
// to. They share nothing with it but ModelConfig and the weights, and are for small models alone.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/philox.h"
#include "model/config.h"

namespace onescale {

using PlainWeights = std::map<std::string, std::vector<double>>;  // by Hugging Face name, row after row

// What dropout multiplies an element with: a feature, or the key that a head's query sees.
using PlainDropout = std::function<double(Site site, std::int64_t layer, std::int64_t row, std::int64_t position,
                                          std::int64_t head, std::int64_t element)>;

// The mean loss, in nats, of the targets that are not -100. ids and labels are rows of T tokens; labels are shifted
// already.
double plain_loss(const ModelConfig& config, const PlainWeights& weights, std::int64_t T,
                  const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& labels,
                  const PlainDropout& dropout = {});

// AdamW of Loshchilov and Hutter (2019), whose weights decay beside the update, or SGD. Matrices and embeddings alone
// decay.
struct PlainOptimizer {
  bool adamw;
  double lr, beta1, beta2, eps, weight_decay;
  PlainWeights first = {}, second = {};
  int count = 0;
  void update(PlainWeights& weights, const PlainWeights& gradient);
};

}  // namespace onescale
