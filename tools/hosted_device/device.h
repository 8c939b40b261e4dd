#pragma once

#include <ATen/ATen.h>

namespace hosted {

// The same values, at the same place, as a tensor of the CPU. Those of the CPU are returned as they are.
at::Tensor on_host(const at::Tensor& tensor);

// How many there are: HOSTED_DEVICES, else 4.
c10::DeviceIndex devices();

// Make torch know the device.
void begin();

}  // namespace hosted
