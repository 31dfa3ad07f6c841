// The operator bitline::cpu_linear, registered with torch's dispatcher through the C functions of torch's stable ABI
// (torch/csrc/inductor/aoti_torch/c/shim.h, torch >= 2.9). They are looked up by name in the loaded library, so that one build
// without torch's headers serves every version that has them. Python defines the operator's schema. An error is thrown by torch's
// own check function, through frames without destructors: the core has no C++ runtime, whichever torch was built with.
#include <dlfcn.h>
#include <stdlib.h>

#include "gemm.h"

namespace bitline {
namespace {

using Handle = void*;         // AtenTensorHandle, or a library
using StableIValue = uint64_t;  // an argument: a number, a tensor's handle, or for an optional one a pointer to that
using AOTITorchError = int32_t;

// Member name, symbol and arguments of each function, as the shim declares them.
#define BITLINE_SHIM(F)                                                                               \
  F(init, aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, Handle*))   \
  F(impl, aoti_torch_library_impl, (Handle, const char*, void (*)(StableIValue*, uint64_t, uint64_t)))       \
  F(release, aoti_torch_delete_tensor_object, (Handle))                                               \
  F(data, aoti_torch_get_data_ptr, (Handle, void**))                                                  \
  F(dim, aoti_torch_get_dim, (Handle, int64_t*))                                                     \
  F(sizes, aoti_torch_get_sizes, (Handle, int64_t**))                                                 \
  F(strides, aoti_torch_get_strides, (Handle, int64_t**))                                             \
  F(dtype, aoti_torch_get_dtype, (Handle, int32_t*))                                                 \
  F(empty, aoti_torch_empty_strided, (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*)) \
  F(copy, aoti_torch_copy_, (Handle, Handle, int32_t))
#define BITLINE_POINTER(name, symbol, arguments) AOTITorchError(*name) arguments = nullptr;
struct {
  BITLINE_SHIM(BITLINE_POINTER)
  void (*throw_error)(const char* function, const char* file, uint32_t line, const char* message) = nullptr;
  int32_t float32, float16, bfloat16, cpu;
} torch;

constexpr int kMaxDims = 16;

struct OwnedTensor {
  Handle handle = nullptr;
  ~OwnedTensor() {
    if (handle != nullptr) torch.release(handle);
  }
};

// Of each function below: an error's message, or null.
const char* empty_contiguous(int64_t dims, const int64_t* sizes, int32_t dtype, Handle* out) {
  int64_t strides[kMaxDims], stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) strides[i] = stride, stride *= sizes[i] > 1 ? sizes[i] : 1;
  return torch.empty(dims, sizes, strides, dtype, torch.cpu, 0, out) ? "cpu_linear: no memory for the output" : nullptr;
}

const char* dtype_of(Handle x, int32_t* torch_dtype, Dtype* dtype) {
  if (torch.dtype(x, torch_dtype)) return "cpu_linear: no input";
  if (*torch_dtype == torch.bfloat16) return *dtype = kBFloat16, nullptr;
  if (*torch_dtype == torch.float16) return *dtype = kFloat16, nullptr;
  if (*torch_dtype == torch.float32) return *dtype = kFloat32, nullptr;
  return "cpu_linear: x must be bfloat16, float16 or float32";
}

const char* gemm_error(int error) {
  if (error == 0) return nullptr;
  if (error == -2) return "cpu_linear: no memory";
  return error == -3 ? "cpu_linear: no kernel for this level of CPU features"
                     : "cpu_linear: the packed weight is of another version";
}

// (x [..., K], packed weight, bias or None, n) -> y [..., N].
const char* linear(StableIValue* stack) {
  OwnedTensor x, weight, bias, x_contiguous, y;
  x.handle = reinterpret_cast<Handle>(stack[0]), weight.handle = reinterpret_cast<Handle>(stack[1]);
  if (stack[2]) {
    StableIValue* optional = reinterpret_cast<StableIValue*>(stack[2]);
    bias.handle = reinterpret_cast<Handle>(*optional);
    free(optional);  // of torch's operator new, which is malloc
  }
  int64_t dims, *sizes, *strides, shape[kMaxDims];
  if (torch.dim(x.handle, &dims) || torch.sizes(x.handle, &sizes) || torch.strides(x.handle, &strides))
    return "cpu_linear: no input";
  int32_t torch_dtype;
  Dtype dtype;
  if (const char* error = dtype_of(x.handle, &torch_dtype, &dtype)) return error;
  if (dims < 1 || dims > kMaxDims) return "cpu_linear: x must have 1 to 16 dimensions";
  int64_t stride = 1, m = 1;
  bool contiguous = true;
  for (int64_t i = dims - 1; i >= 0; --i) {
    contiguous &= sizes[i] == 1 || strides[i] == stride;
    stride *= sizes[i], shape[i] = sizes[i];
    if (i < dims - 1) m *= sizes[i];
  }
  void *packed_data, *x_data, *y_data, *bias_data = nullptr;
  if (torch.data(weight.handle, &packed_data)) return "cpu_linear: a packed weight without data";
  const PackedHeader& packed = *static_cast<const PackedHeader*>(packed_data);
  const int64_t n = int64_t(stack[3]);
  if (packed.n != n || packed.k != sizes[dims - 1])
    return "cpu_linear: the packed weight is of another shape, or not one of this operator's";
  if (!contiguous) {
    if (const char* error = empty_contiguous(dims, sizes, torch_dtype, &x_contiguous.handle)) return error;
    if (torch.copy(x_contiguous.handle, x.handle, 0)) return "cpu_linear: x cannot be made contiguous";
  }
  shape[dims - 1] = n;
  if (const char* error = empty_contiguous(dims, shape, torch_dtype, &y.handle)) return error;
  if (m > 0) {
    if (torch.data(contiguous ? x.handle : x_contiguous.handle, &x_data) || torch.data(y.handle, &y_data) ||
        (bias.handle != nullptr && torch.data(bias.handle, &bias_data)))
      return "cpu_linear: a tensor without data";
    if (const char* error = gemm_error(bitline_gemm(x_data, m, &packed, bias_data, y_data, dtype))) return error;
  }
  stack[0] = reinterpret_cast<StableIValue>(y.handle);
  y.handle = nullptr;  // the caller's
  return nullptr;
}

// The operator's boxed function.
void cpu_linear(StableIValue* stack, uint64_t, uint64_t) {
  if (const char* error = linear(stack)) torch.throw_error("cpu_linear", "csrc/torch_op.cpp", 0, error);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Register the operator's implementation for CPU tensors; its schema must be defined. torch_library: path of libtorch_cpu,
// already loaded. Returns 0; -1: that library lacks a function or refuses.
BITLINE_EXPORT int bitline_register_torch_op(const char* torch_library) {
  void* library = dlopen(torch_library, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return -1;
#define BITLINE_LOOK_UP(name, symbol, arguments)                                                 \
  if ((torch.name = reinterpret_cast<AOTITorchError(*) arguments>(dlsym(library, #symbol))) == nullptr) return -1;
  BITLINE_SHIM(BITLINE_LOOK_UP)
  // c10::detail::torchCheckFail(const char*, const char*, uint32_t, const char*), in a library that torch_library needs.
  torch.throw_error = reinterpret_cast<decltype(torch.throw_error)>(
      dlsym(library, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"));
  if (torch.throw_error == nullptr) return -1;
  const auto constant = [&](const char* name, int32_t* out) {
    const auto function = reinterpret_cast<int32_t (*)()>(dlsym(library, name));
    if (function != nullptr) *out = function();
    return function != nullptr;
  };
  if (!constant("aoti_torch_dtype_float32", &torch.float32) || !constant("aoti_torch_dtype_float16", &torch.float16) ||
      !constant("aoti_torch_dtype_bfloat16", &torch.bfloat16) || !constant("aoti_torch_device_type_cpu", &torch.cpu))
    return -1;
  Handle registration;  // lives as long as the process
  if (torch.init("bitline", "CPU", "csrc/torch_op.cpp", 0, &registration)) return -1;
  return torch.impl(registration, "cpu_linear", cpu_linear) ? -1 : 0;
}
