#include "top_k.h"

namespace bitline {
namespace {

// torch.topk calls the C++ library's partial_sort, nth_element and sort, and which of equal probabilities come first is what their
// steps happen to do. These are the same steps: the core links no C++ library, and another one's differ.

constexpr int64_t kSmallest = 3;     // quickselect leaves as many to the insertion sort
constexpr int64_t kInsertions = 16;  // and quicksort as many

bool before(const Candidate& a, const Candidate& b) {
  const bool a_nan = a.probability != a.probability, b_nan = b.probability != b.probability;
  return (a_nan && !b_nan) || a.probability > b.probability;
}

void swap(Candidate& a, Candidate& b) {
  const Candidate kept = a;
  a = b, b = kept;
}

// Partitions that may be bad before a heap takes over.
int partitions(int64_t n) { return 2 * (63 - __builtin_clzll(uint64_t(n))); }

// Puts `value` into a heap of n whose node `hole` is free: down to a leaf, then up to where it belongs.
void fill_hole(Candidate* heap, int64_t hole, int64_t n, Candidate value) {
  const int64_t top = hole;
  for (int64_t child = 2 * hole + 2; child <= n; child = 2 * hole + 2) {
    if (child == n || before(heap[child], heap[child - 1])) --child;
    heap[hole] = heap[child];
    hole = child;
  }
  for (; hole > top && before(heap[(hole - 1) / 2], value); hole = (hole - 1) / 2) heap[hole] = heap[(hole - 1) / 2];
  heap[hole] = value;
}

// Moves the k that come first to the front, as a heap with the last of them at its root.
void heap_select(Candidate* all, int64_t n, int64_t k) {
  for (int64_t node = k / 2 - 1; node >= 0; --node) fill_hole(all, node, k, all[node]);
  for (int64_t i = k; i < n; ++i) {
    if (!before(all[i], all[0])) continue;
    const Candidate value = all[i];
    all[i] = all[0];
    fill_hole(all, 0, k, value);
  }
}

void heap_sort(Candidate* all, int64_t n, int64_t k) {
  heap_select(all, n, k);
  for (int64_t last = k - 1; last > 0; --last) {
    const Candidate value = all[last];
    all[last] = all[0];
    fill_hole(all, 0, last, value);
  }
}

void insertion_sort(Candidate* all, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const Candidate value = all[i];
    int64_t at = i;
    for (; at > 0 && before(value, all[at - 1]); --at) all[at] = all[at - 1];
    all[at] = value;
  }
}

// Partitions around the median of the second, the middle and the last. Returns where the right part begins. n: at least 4.
int64_t partition(Candidate* all, int64_t n) {
  Candidate &a = all[1], &b = all[n / 2], &c = all[n - 1];
  Candidate& low = before(a, b) ? a : b;
  Candidate& high = before(a, b) ? b : a;
  swap(all[0], before(high, c) ? high : before(low, c) ? c : low);
  int64_t left = 1, right = n;
  for (;; ++left) {
    while (before(all[left], all[0])) ++left;
    --right;
    while (before(all[0], all[right])) --right;
    if (left >= right) return left;
    swap(all[left], all[right]);
  }
}

// Moves the one that is `nth` in order to its place, between those before and those after it.
void quickselect(Candidate* all, int64_t n, int64_t nth) {
  for (int left = partitions(n); n > kSmallest; --left) {
    if (left == 0) {
      heap_select(all, n, nth + 1);
      return swap(all[0], all[nth]);
    }
    const int64_t cut = partition(all, n);
    if (cut <= nth)
      all += cut, n -= cut, nth -= cut;
    else
      n = cut;
  }
  insertion_sort(all, n);
}

void quicksort(Candidate* all, int64_t n, int left) {
  for (; n > kInsertions; --left) {
    if (left == 0) return heap_sort(all, n, n);
    const int64_t cut = partition(all, n);
    quicksort(all + cut, n - cut, left - 1);
    n = cut;
  }
}

}  // namespace

void select_top_k(Candidate* all, int64_t n, int64_t k) {
  if (k * 64 <= n) return heap_sort(all, n, k);
  quickselect(all, n, k - 1);
  if (k < 3) return;
  quicksort(all, k - 1, partitions(k - 1));
  insertion_sort(all, k - 1);
}

}  // namespace bitline
