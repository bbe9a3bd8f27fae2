// The memory that the kernels of a launch may access, several tensors at a time: names and tensors
// by turns, as the launch's may_read() and may_write() take one of each. Host C++ without torch.
#pragma once

namespace thunderkittens {

template <class Launch, class Tensor, class... Others>
void reads(Launch& launch, const char* name, const Tensor& tensor, const Others&... others) {
    launch.may_read(name, tensor);
    if constexpr (sizeof...(others) > 0) reads(launch, others...);
}
template <class Launch, class Tensor, class... Others>
void writes(Launch& launch, const char* name, const Tensor& tensor, const Others&... others) {
    launch.may_write(name, tensor);
    if constexpr (sizeof...(others) > 0) writes(launch, others...);
}

}  // namespace thunderkittens
