// The operator bitline::cpu_linear, bound to torch's dispatcher through the C functions of torch's stable ABI
// (torch/csrc/inductor/aoti_torch/c/shim.h, torch >= 2.9). They are looked up in the loaded library by name, so no header of
// torch is needed to build this and one build serves every version that has them. Python defines the operator's schema.
#include <dlfcn.h>
#include <stdio.h>

#include <stdexcept>

#include "isa.h"

BITLINE_EXPORT int bitline_gemm(const void* x, int64_t m, const void* packed, const void* bias, void* y, int dtype);

namespace bitline {
namespace {

using Handle = void*;      // a tensor or a library of torch's
using Value = uint64_t;    // an argument: a number, a tensor's handle, or for an optional one a pointer to that
using Failed = int32_t;

// Each function, as the shim declares it.
#define BITLINE_SHIM(F)                                                                               \
  F(init, aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, Handle*))   \
  F(impl, aoti_torch_library_impl, (Handle, const char*, void (*)(Value*, uint64_t, uint64_t)))       \
  F(release, aoti_torch_delete_tensor_object, (Handle))                                               \
  F(data, aoti_torch_get_data_ptr, (Handle, void**))                                                  \
  F(dims, aoti_torch_get_dim, (Handle, int64_t*))                                                     \
  F(sizes, aoti_torch_get_sizes, (Handle, int64_t**))                                                 \
  F(strides, aoti_torch_get_strides, (Handle, int64_t**))                                             \
  F(scalar, aoti_torch_get_dtype, (Handle, int32_t*))                                                 \
  F(empty, aoti_torch_empty_strided, (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*)) \
  F(copy, aoti_torch_copy_, (Handle, Handle, int32_t))
#define BITLINE_POINTER(name, symbol, arguments) Failed(*name) arguments = nullptr;
struct {
  BITLINE_SHIM(BITLINE_POINTER)
  int32_t float32, float16, bfloat16, cpu;
} torch;

constexpr int kMostDims = 16;

struct Owned {
  Handle at = nullptr;
  ~Owned() {
    if (at != nullptr) torch.release(at);
  }
};

[[noreturn]] void fail(const char* what) { throw std::runtime_error(what); }

// A tensor of these sizes, contiguous.
Handle contiguous(int64_t dims, const int64_t* sizes, int32_t dtype) {
  int64_t strides[kMostDims], step = 1;
  for (int64_t i = dims - 1; i >= 0; --i) strides[i] = step, step *= sizes[i] > 1 ? sizes[i] : 1;
  Handle out;
  if (torch.empty(dims, sizes, strides, dtype, torch.cpu, 0, &out)) fail("cpu_linear: no memory for the output");
  return out;
}

void* pointer(Handle tensor) {
  void* at;
  if (torch.data(tensor, &at)) fail("cpu_linear: a tensor without data");
  return at;
}

// (x, packed weight, optional bias, n) -> x's leading dimensions and n.
void linear(Value* stack, uint64_t, uint64_t) {
  Owned x, weight, bias, copied;
  x.at = reinterpret_cast<Handle>(stack[0]), weight.at = reinterpret_cast<Handle>(stack[1]);
  if (stack[2]) {
    Value* held = reinterpret_cast<Value*>(stack[2]);
    bias.at = reinterpret_cast<Handle>(*held);
    delete held;
  }
  int64_t dims, *sizes, *strides, shape[kMostDims];
  int32_t scalar;
  if (torch.dims(x.at, &dims) || torch.sizes(x.at, &sizes) || torch.strides(x.at, &strides) || torch.scalar(x.at, &scalar))
    fail("cpu_linear: no input");
  const int dtype = scalar == torch.bfloat16 ? 2 : scalar == torch.float16 ? 1 : scalar == torch.float32 ? 0 : -1;
  if (dtype < 0) fail("cpu_linear: an input of bfloat16, float16 or float32 is needed");
  if (dims < 1 || dims > kMostDims) fail("cpu_linear: an input of 1 to 16 dimensions is needed");
  int64_t step = 1, rows = 1;
  bool dense = true;
  for (int64_t i = dims - 1; i >= 0; --i) {
    dense &= sizes[i] == 1 || strides[i] == step;
    step *= sizes[i], shape[i] = sizes[i];
    if (i < dims - 1) rows *= sizes[i];
  }
  const uint8_t* packed = static_cast<const uint8_t*>(pointer(weight.at));
  const int64_t n = int64_t(stack[3]);
  if (reinterpret_cast<const int64_t*>(packed)[2] != n || reinterpret_cast<const int64_t*>(packed)[3] != sizes[dims - 1])
    fail("cpu_linear: the packed weight is of another shape, or not one of this operator's");
  if (!dense) {
    copied.at = contiguous(dims, sizes, scalar);
    if (torch.copy(copied.at, x.at, 0)) fail("cpu_linear: the input cannot be made contiguous");
  }
  shape[dims - 1] = n;
  const Handle y = contiguous(dims, shape, scalar);
  const int failed = rows == 0 ? 0 : bitline_gemm(pointer(dense ? x.at : copied.at), rows, packed,
                                                  bias.at == nullptr ? nullptr : pointer(bias.at), pointer(y), dtype);
  if (failed) {
    torch.release(y);
    fail(failed == -2 ? "cpu_linear: no memory" : failed == -3 ? "cpu_linear: no kernel for this level of CPU features"
                                                               : "cpu_linear: the packed weight is of another version");
  }
  stack[0] = reinterpret_cast<Value>(y);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Give torch the operator's implementation for CPU tensors; its schema must be defined. torch_library: libtorch_cpu, loaded
// already. Returns 0; -1 where that library lacks a function or refuses.
BITLINE_EXPORT int bitline_bind(const char* torch_library) {
  void* library = dlopen(torch_library, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return -1;
#define BITLINE_LOOK_UP(name, symbol, arguments)                                                 \
  if ((torch.name = reinterpret_cast<Failed(*) arguments>(dlsym(library, #symbol))) == nullptr) return -1;
  BITLINE_SHIM(BITLINE_LOOK_UP)
  const auto number = [&](const char* name, int32_t* out) {
    const auto function = reinterpret_cast<int32_t (*)()>(dlsym(library, name));
    if (function != nullptr) *out = function();
    return function != nullptr;
  };
  if (!number("aoti_torch_dtype_float32", &torch.float32) || !number("aoti_torch_dtype_float16", &torch.float16) ||
      !number("aoti_torch_dtype_bfloat16", &torch.bfloat16) || !number("aoti_torch_device_type_cpu", &torch.cpu))
    return -1;
  Handle registration;  // lives as long as the process
  if (torch.init("bitline", "CPU", "csrc/op.cpp", 0, &registration)) return -1;
  return torch.impl(registration, "cpu_linear", linear) ? -1 : 0;
}
