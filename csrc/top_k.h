// The largest probabilities as torch.topk chooses them on a CPU, also among equals.
#pragma once

#include <stdint.h>

namespace bitline {

struct Candidate {
  float probability;
  int64_t expert;
};

// Moves the k (1...n) largest of `all` [n] to its front, the largest first. NaN is larger than all numbers.
void select_top_k(Candidate* all, int64_t n, int64_t k);

}  // namespace bitline
