// The two types of numbers that kernels read and write. All of them compute in float32.
#pragma once

#include <cstdint>

namespace equipoise {

struct bf16 {
  uint16_t bits;
};

}  // namespace equipoise
