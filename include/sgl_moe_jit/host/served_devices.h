// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/served_devices.h: the devices that a CUDA module's code is for, as Python has told it.
#pragma once

#include <atomic>
#include <cstdint>

#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace host {

class ServedDevices {
 public:
  void add(int64_t device, bool supports_pdl) {
    TVM_FFI_ICHECK(device >= 0 && device < 64) << "device: expected 0 to 63, got " << device;
    if (supports_pdl) with_pdl_ |= uint64_t{1} << device;
    all_ |= uint64_t{1} << device;
  }
  bool has(DLDevice device) const { return has_bit(all_, device); }
  // Whether it has programmatic dependent launch.
  bool has_pdl(DLDevice device) const { return has_bit(with_pdl_, device); }

 private:
  static bool has_bit(const std::atomic<uint64_t>& bits, DLDevice device) {
    return device.device_type == kDLCUDA && device.device_id >= 0 && device.device_id < 64 &&
           (bits.load(std::memory_order_relaxed) >> device.device_id & 1) != 0;
  }

  std::atomic<uint64_t> all_{0}, with_pdl_{0};
};

}  // namespace host
}  // namespace sgl_moe_jit
