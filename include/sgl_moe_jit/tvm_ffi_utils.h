// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// tvm_ffi_utils.h: what every binding needs to check a tensor and say what is wrong with it.
//
// A caller's mistake throws TypeError (dtype) or ValueError (shape, stride, device, range); each
// message names the argument, what was expected and what came. Host code only.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <sstream>
#include <string>

#define SMJ_CHECK_VALUE(cond) \
  if (!(cond)) TVM_FFI_THROW(ValueError)
#define SMJ_CHECK_TYPE(cond) \
  if (!(cond)) TVM_FFI_THROW(TypeError)

namespace sgl_moe_jit {
namespace host {

using tvm::ffi::Optional;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

// kNone: there is no such tensor.
enum class DType { kFloat32, kBFloat16, kFloat16, kInt32, kInt64, kNone, kOther };

inline DType dtype_of(DLDataType t) {
  if (t.lanes != 1) return DType::kOther;
  if (t.code == kDLFloat && t.bits == 32) return DType::kFloat32;
  if (t.code == kDLBfloat && t.bits == 16) return DType::kBFloat16;
  if (t.code == kDLFloat && t.bits == 16) return DType::kFloat16;
  if (t.code == kDLInt && t.bits == 32) return DType::kInt32;
  if (t.code == kDLInt && t.bits == 64) return DType::kInt64;
  return DType::kOther;
}

// Not for kNone and kOther.
inline int64_t item_size(DType t) {
  if (t == DType::kBFloat16 || t == DType::kFloat16) return 2;
  return t == DType::kInt64 ? 8 : 4;
}

inline bool is_float(DType t) {
  return t == DType::kFloat32 || t == DType::kBFloat16 || t == DType::kFloat16;
}

inline std::string dtype_name(DLDataType t) {
  switch (t.code) {
    case kDLFloat:
      return "float" + std::to_string(t.bits);
    case kDLBfloat:
      return "bfloat" + std::to_string(t.bits);
    case kDLInt:
      return "int" + std::to_string(t.bits);
    case kDLUInt:
      return "uint" + std::to_string(t.bits);
    case kDLBool:
      return "bool";
    case kDLFloat8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return "dtype code " + std::to_string(t.code) + " of " + std::to_string(t.bits) + " bits";
  }
}

inline std::string shape_text(const TensorView& x) {
  std::ostringstream text;
  text << "[";
  for (int32_t i = 0; i < x.ndim(); ++i) text << (i ? ", " : "") << x.size(i);
  text << "]";
  return text.str();
}

inline std::string device_text(DLDevice d) {
  std::string kind = d.device_type == kDLCPU ? "cpu" : d.device_type == kDLCUDA ? "cuda" : "device";
  return d.device_type == kDLCPU ? kind : kind + ":" + std::to_string(d.device_id);
}

inline void check_device(const char* name, const TensorView& x, DLDevice expected) {
  SMJ_CHECK_VALUE(x.device().device_type == expected.device_type &&
                  x.device().device_id == expected.device_id)
      << name << ": expected device " << device_text(expected) << " like the first tensor, got "
      << device_text(x.device()) << "; move it with .to()";
}

// torch has tensors of zeros that own no memory.
inline void check_memory(const char* name, const TensorView& x) {
  SMJ_CHECK_VALUE(x.data_ptr() != nullptr || x.numel() == 0)
      << name << ": expected a tensor with memory, got one without; call .clone()";
}

// A [rows, columns] matrix whose columns lie side by side; rows may be any distance apart.
inline void check_rows(const char* name, const TensorView& x) {
  SMJ_CHECK_VALUE(x.ndim() == 2) << name << ": expected 2 dimensions, got shape " << shape_text(x);
  check_memory(name, x);
  SMJ_CHECK_VALUE(x.size(1) <= 1 || x.stride(1) == 1)
      << name << ": expected adjacent columns (stride 1), got stride " << x.stride(1)
      << "; call .contiguous()";
  SMJ_CHECK_VALUE(x.size(0) <= 1 || x.stride(0) >= 0)
      << name << ": expected a row stride >= 0, got " << x.stride(0) << "; call .contiguous()";
}

// tvm-ffi 0.1.11 calls a tensor without elements not contiguous.
inline bool is_contiguous(const TensorView& x) { return x.numel() == 0 || x.IsContiguous(); }

inline void check_contiguous(const char* name, const TensorView& x) {
  check_memory(name, x);
  SMJ_CHECK_VALUE(is_contiguous(x))
      << name << ": expected a contiguous tensor, got a strided view; call .contiguous()";
}

// Distance between rows in elements; a single row has none, so its own width is used.
inline int64_t row_stride(const TensorView& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }

// The bytes of count rows of the same width, the same distance apart.
struct RowBytes {
  int64_t begin = 0, width = 0, stride = 0, count = 0;

  int64_t end() const { return count == 0 ? begin : begin + (count - 1) * stride + width; }

  // Whether one of the rows holds one of the bytes [first, last).
  bool meets(int64_t first, int64_t last) const {
    if (first >= end() || last <= begin) return false;
    if (stride == 0) return true;
    // The last row that begins before last; every row before it ends earlier.
    int64_t row = (last - 1 - begin) / stride;
    if (row >= count) row = count - 1;
    return begin + row * stride + width > first;
  }

  // Exact: two sets of columns of one matrix share nothing, though one lies within the other's
  // range. It looks at each row of the smaller, but only where ranges meet.
  bool overlaps(const RowBytes& other) const {
    if (count == 0 || other.count == 0) return false;
    if (begin >= other.end() || other.begin >= end()) return false;
    if (count > other.count) return other.overlaps(*this);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t first = begin + row * stride;
      if (other.meets(first, first + width)) return true;
    }
    return false;
  }
};

// Where a matrix's rows, or the items of a contiguous tensor of other dimensions, lie.
inline RowBytes row_bytes(const TensorView& x) {
  if (x.numel() == 0) return {};
  const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data_ptr()));
  const int64_t item = x.dtype().bits / 8;
  if (x.ndim() != 2) return {begin, x.numel() * item, 0, 1};
  const int64_t width = x.size(1) * item, stride = row_stride(x) * item;
  if (stride == 0) return {begin, width, 0, 1};
  if (stride == width) return {begin, width * x.size(0), 0, 1};
  return {begin, width, stride, x.size(0)};
}

}  // namespace host
}  // namespace sgl_moe_jit
