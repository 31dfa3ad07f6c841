// Pages of mapped files, faulted in before all threads read them in an order that the system's read-around does not follow.
#pragma once

#include <stdint.h>

namespace bitline {

// Fault in the pages of [at, at + bytes) for reading, on all threads. Only a hint: what fails is left to page faults.
void prefault_source(const void* at, int64_t bytes);

}  // namespace bitline
