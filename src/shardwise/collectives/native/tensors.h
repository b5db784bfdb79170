// From torch's tensors and reductions to the engine's pointers and calls, with the checks that need torch.
#pragma once

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "group.h"
#include "staging.h"

namespace shardwise {

inline Number number_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Number::f32;
    case at::kDouble: return Number::f64;
    case at::kHalf: return Number::f16;
    case at::kBFloat16: return Number::bf16;
    case at::kChar: return Number::i8;
    case at::kByte: return Number::u8;
    case at::kShort: return Number::i16;
    case at::kInt: return Number::i32;
    case at::kLong: return Number::i64;
    case at::kBool: return Number::boolean;
    default: return Number::other;
  }
}

inline void check_alike(const Tensors& tensors, const Tensor& like) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel(),
                "shardwise engine: all tensors of the call must have one dtype and size, but one has ", tensor.numel(),
                " elements of ", tensor.scalar_type(), " and another ", like.numel(), " of ", like.scalar_type());
  }
}

inline const Tensor& only(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "shardwise engine: one tensor is expected, not ", tensors.size());
  return tensors[0];
}

// The lists of a call that has one list, or none on a rank that gives none.
inline const Tensors& only_list(const std::vector<Tensors>& lists, int size) {
  TORCH_CHECK(lists.size() == 1 && lists[0].size() == static_cast<size_t>(size),
              "shardwise engine: a list of ", size, " tensors is expected, one a rank");
  return lists[0];
}

// The parts of the ranks in one buffer.
inline Tensors parts_of(const Tensor& whole, int size) {
  TORCH_CHECK(whole.numel() % size == 0, "shardwise engine: ", whole.numel(), " elements cannot be split over ", size, " ranks");
  return whole.view({-1}).tensor_split(size);
}

inline std::vector<void*> pointers(const Tensors& tensors) {
  std::vector<void*> found;
  for (const Tensor& tensor : tensors) found.push_back(tensor.data_ptr());
  return found;
}

inline std::vector<const void*> const_pointers(const Tensors& tensors) {
  std::vector<const void*> found;
  for (const Tensor& tensor : tensors) found.push_back(tensor.const_data_ptr());
  return found;
}

// Splits of all-to-all: `sizes` rows of each rank, or all the same where there are none.
inline std::vector<Piece> pieces_of(const Tensor& whole, const std::vector<int64_t>& sizes, int ranks) {
  const int64_t rows = whole.dim() == 0 ? 0 : whole.size(0), row = rows == 0 ? 0 : whole.nbytes() / rows;
  TORCH_CHECK(sizes.empty() ? rows % ranks == 0 : sizes.size() == static_cast<size_t>(ranks),
              "shardwise engine: all_to_all needs one split a rank, or a first dimension that ", ranks, " ranks divide");
  std::vector<Piece> pieces;
  char* at = static_cast<char*>(whole.data_ptr());
  int64_t total = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t count = sizes.empty() ? rows / ranks : sizes[rank];
    TORCH_CHECK(count >= 0, "shardwise engine: a split of all_to_all is ", count);
    pieces.push_back({at, static_cast<uint64_t>(count * row)});
    at += count * row;
    total += count;
  }
  TORCH_CHECK(total == rows, "shardwise engine: the splits of all_to_all add up to ", total, " of ", rows, " rows");
  return pieces;
}

// The same of rows that lie at `places` of `whole`, in this order; of all its rows where there are no places.
inline std::vector<Piece> pieces_at(const Tensor& whole, const std::optional<Tensor>& places, const std::vector<int64_t>& sizes, int ranks) {
  TORCH_CHECK(whole.device().is_cpu() && is_plain(whole) && whole.dim() > 0, "shardwise engine: rows of a tensor on the CPU are expected");
  if (!places) return pieces_of(whole, sizes, ranks);
  TORCH_CHECK(places->device().is_cpu() && is_plain(*places) && places->scalar_type() == at::kLong && places->dim() == 1,
              "shardwise engine: places of rows are a list of int64 on the CPU");
  const int64_t* const first = places->const_data_ptr<int64_t>();
  const auto outside = [&](int64_t place) { return place < 0 || place >= whole.size(0); };
  TORCH_CHECK(std::none_of(first, first + places->numel(), outside), "shardwise engine: a place is none of ", whole.size(0), " rows");
  std::vector<Piece> pieces = pieces_of(*places, sizes, ranks);  // of places, 8 bytes each
  const uint64_t row = whole.size(0) == 0 ? 0 : whole.nbytes() / whole.size(0);
  for (Piece& piece : pieces) {
    const int64_t* const rows = static_cast<const int64_t*>(piece.data);
    piece = {whole.data_ptr(), piece.bytes / sizeof *rows * row, rows, row};
  }
  return pieces;
}

// Whose tensors the calls of this thread move.
inline thread_local Label current_label{};

inline void set_label(uint64_t digest, const std::string& text) {
  current_label.digest = digest;
  std::snprintf(current_label.text, sizeof current_label.text, "%s", text.c_str());
}

inline Call call_of(Kind kind, const Tensor& like, int64_t count, int64_t root = -1) {
  Call call{};
  call.kind = kind;
  call.reduce = Reduce::none;
  call.dtype = static_cast<int32_t>(like.scalar_type());
  call.number = number_of(like.scalar_type());
  call.root = static_cast<int32_t>(root);
  call.item = static_cast<uint32_t>(like.element_size());
  call.count = static_cast<uint64_t>(count);
  call.factor = 1;
  call.label = current_label;
  return call;
}

inline bool is_complex(const Call& call) { return c10::isComplexType(static_cast<at::ScalarType>(call.dtype)); }

// Complex numbers are added as twice as many real ones; nothing else is defined part by part.
inline Call of_parts(Call call, c10d::ReduceOp::RedOpType operation) {
  const bool adds = operation == c10d::ReduceOp::SUM || operation == c10d::ReduceOp::AVG || operation == c10d::ReduceOp::PREMUL_SUM;
  TORCH_CHECK_TYPE(adds, "shardwise engine: complex numbers can be summed and averaged, nothing else");
  call.number = number_of(c10::toRealValueType(static_cast<at::ScalarType>(call.dtype)));
  call.item /= 2;
  call.count *= 2;
  call.is_complex = true;
  return call;
}

inline Call with(Call call, const c10d::ReduceOp& operation) {
  if (is_complex(call)) call = of_parts(call, operation.op_);
  switch (operation.op_) {
    case c10d::ReduceOp::SUM: call.reduce = Reduce::sum; break;
    case c10d::ReduceOp::AVG: call.reduce = Reduce::average; break;
    case c10d::ReduceOp::PRODUCT: call.reduce = Reduce::product; break;
    case c10d::ReduceOp::MIN: call.reduce = Reduce::min; break;
    case c10d::ReduceOp::MAX: call.reduce = Reduce::max; break;
    case c10d::ReduceOp::BAND: call.reduce = Reduce::bit_and; break;
    case c10d::ReduceOp::BOR: call.reduce = Reduce::bit_or; break;
    case c10d::ReduceOp::BXOR: call.reduce = Reduce::bit_xor; break;
    case c10d::ReduceOp::PREMUL_SUM: {
      // torch 2.11 has this name alone, later ones keep it beside a new one
      const auto* scale = static_cast<const c10d::NCCLPreMulSumSupplement*>(operation.supplement_.get());
      TORCH_CHECK(scale != nullptr, "shardwise engine: a premultiplied sum needs its factor");
      call.reduce = Reduce::scaled_sum;
      call.factor = scale->tensor_factor.defined() ? scale->tensor_factor.item<double>() : scale->double_factor;
      break;
    }
    default: TORCH_CHECK(false, "shardwise engine: unknown reduction");
  }
  const char* refused = refusal(call.number, call.reduce);
  const auto dtype = static_cast<at::ScalarType>(call.dtype);
  const char* const called = call.number == Number::other ? c10::toString(dtype) : name(call.number);
  TORCH_CHECK_TYPE(refused == nullptr, "shardwise engine: ", name(call.reduce), " of ", called, ": ", refused);
  return call;
}

}  // namespace shardwise
