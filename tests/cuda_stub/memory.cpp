// Tensors that say they lie on a GPU, in the host's memory, for a torch without CUDA: as much of torch's CUDA device as
// the library's host code asks for. Filling, copying and adding is work for a device and is not done: no number here
// means anything.
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

void launched_by_torch(const char* kernel, int device);  // runtime.cpp
void allocated();

namespace {

using at::Tensor;

Tensor made(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  int64_t numbers = 1;
  for (size_t k = 0; k < sizes.size(); ++k) numbers = sizes[k] ? numbers + (sizes[k] - 1) * strides[k] : 0;
  const size_t bytes = size_t(std::max<int64_t>(numbers, 0)) * c10::elementSize(type);
  allocated();
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
  const auto deleter = memory.get_deleter();
  void* data = memory.get();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, {data, memory.release_context(), deleter, device},
                       nullptr, false);
  Tensor x = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                      c10::scalarTypeToTypeMeta(type));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return x;
}

c10::Device device_of(std::optional<c10::Device> given) {
  return given && given->has_index() ? *given : c10::Device(c10::kCUDA, 0);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return made(sizes, strides, type.value_or(at::kFloat), device_of(device));
}
Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat>) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t k = sizes.size(); k-- > 1;) strides[k - 1] = strides[k] * std::max<int64_t>(sizes[k], 1);
  return made(sizes, strides, type.value_or(at::kFloat), device_of(device));
}
void launched(const char* kernel, const Tensor& x) {
  if (x.numel() > 0) launched_by_torch(kernel, x.device().index());
}
Tensor& copy_(Tensor& to, const Tensor&, bool) { return launched("copy_", to), to; }
Tensor& zero_(Tensor& x) { return launched("zero_", x), x; }
Tensor& fill_(Tensor& x, const at::Scalar&) { return launched("fill_", x), x; }
Tensor on_gpu(const Tensor& host, int64_t index) {
  return made(host.sizes(), host.strides(), host.scalar_type(), {c10::kCUDA, c10::DeviceIndex(index)});
}
Tensor& sum(const Tensor&, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>, Tensor& to) {
  return launched("sum", to), to;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("copy_", copy_);
  m.impl("zero_", zero_);
  m.impl("fill_.Scalar", fill_);
  m.impl("sum.IntList_out", sum);
}
TORCH_LIBRARY(fastcaps_cuda_stub, m) { m.def("on_gpu(Tensor x, int index) -> Tensor", on_gpu); }
