// The sum of sparse tensors (COO): what the ranks have is gathered, and each adds all of it in the order of the ranks.
#pragma once

#include <array>

#include <ATen/core/LegacyTypeDispatch.h>

#include "tensors.h"

namespace shardwise {

class SparseSum {
 public:
  // `tensor` of the CPU is read now and written by `run`.
  SparseSum(const Tensor& tensor, const c10d::ReduceOp& operation) : tensor_(tensor) {
    const bool adds = operation.op_ == c10d::ReduceOp::SUM || operation.op_ == c10d::ReduceOp::AVG;
    TORCH_CHECK_TYPE(adds, "shardwise engine: sparse tensors can be summed and averaged, nothing else");
    TORCH_CHECK(tensor.is_cpu(), "shardwise engine: sparse tensors are reduced on the CPU, not on ", tensor.device());
    TORCH_CHECK(tensor.dim() <= kDimensions, "shardwise engine: sparse tensors of more than ", kDimensions, " dimensions are refused");
    averages_ = operation.op_ == c10d::ReduceOp::AVG;
    const Tensor own = tensor.variable_data().coalesce();
    indices_ = own._indices().contiguous();
    values_ = own._values().contiguous();
  }

  void run(Group& group, int size, int64_t timeout) const {
    const std::vector<int64_t> counts = compare(group, size, timeout);
    const int64_t most = *std::max_element(counts.begin(), counts.end());
    const Tensors indices = gather(group, size, indices_.t().contiguous(), most, timeout);
    const Tensors values = gather(group, size, values_, most, timeout);
    Tensors found, added;
    for (int rank = 0; rank < size; ++rank) {
      found.push_back(indices[rank].narrow(0, 0, counts[rank]));
      added.push_back(values[rank].narrow(0, 0, counts[rank]));
    }
    const Tensor all = at::cat(found).t(), sums = at::cat(added);
    const Tensor sum = at::sparse_coo_tensor(all, sums, tensor_.sizes(), sums.options().layout(at::kSparse)).coalesce();
    if (averages_) sum._values().div_(size);
    const at::AutoDispatchBelowADInplaceOrView without_autograd;  // detached, a sparse tensor would be another one
    tensor_.copy_(sum);
  }

 private:
  static constexpr int kDimensions = 16;
  using Facts = std::array<int64_t, 3 + kDimensions>;  // elements that are there, sparse dimensions, dimensions, sizes

  // How many elements each rank has; shapes have to be equal.
  std::vector<int64_t> compare(Group& group, int size, int64_t timeout) const {
    Facts own{values_.size(0), indices_.size(0), tensor_.dim()};
    std::copy(tensor_.sizes().begin(), tensor_.sizes().end(), own.begin() + 3);
    std::vector<Facts> all(size);
    std::vector<void*> outputs;
    for (Facts& each : all) outputs.push_back(each.data());
    const Tensor like = at::empty({0}, at::kLong);
    group.all_gather(call_of(Kind::all_gather, like, own.size()), own.data(), outputs, timeout);
    std::vector<int64_t> counts;
    for (int rank = 0; rank < size; ++rank) {
      const bool same = std::equal(own.begin() + 1, own.end(), all[rank].begin() + 1);
      TORCH_CHECK(same, "shardwise engine: sparse tensors of different shapes: rank ", rank, " of the group has another one");
      counts.push_back(all[rank][0]);
    }
    return counts;
  }

  // The `own` rows of all ranks, each with room for `most`.
  static Tensors gather(Group& group, int size, const Tensor& own, int64_t most, int64_t timeout) {
    std::vector<int64_t> shape = own.sizes().vec();
    shape[0] = most;
    const Tensor input = at::zeros(shape, own.options());
    input.narrow(0, 0, own.size(0)).copy_(own);
    Tensors outputs;
    for (int rank = 0; rank < size; ++rank) outputs.push_back(at::empty_like(input));
    group.all_gather(call_of(Kind::all_gather, input, input.numel()), input.const_data_ptr(), pointers(outputs), timeout);
    return outputs;
  }

  Tensor tensor_, indices_, values_;
  bool averages_ = false;
};

}  // namespace shardwise
