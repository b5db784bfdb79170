// What can be reduced, and how: element types, operations, and the sum over the ranks' inputs in the order of the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise {

enum class Number : uint32_t { f32, f64, f16, bf16, i8, u8, i16, i32, i64, boolean, other };

enum class Reduce : uint32_t { sum, average, product, min, max, bit_and, bit_or, bit_xor, scaled_sum, none };

const char* name(Number number);
const char* name(Reduce reduce);
size_t bytes_of(Number number);

// Why `reduce` cannot be applied to `number`, or null.
const char* refusal(Number number, Reduce reduce);

// What sums of a number are kept in: fp32 for fp16 and bf16, else the number itself.
Number accumulator(Number number);

// Element types of a reduction: of its inputs and of its output. Equal, or one is the other's accumulator: sums of one
// host's ranks travel to the next host unrounded.
struct Types {
  Number from, to;
};

// out[i] = inputs[0][i] (+) inputs[1][i] (+) ..., always in this order, so that the result does not depend on who came
// first. fp16 and bf16 are accumulated in fp32 and rounded once. `factors` are one number an input for `scaled_sum`;
// `average` divides the sum by `divisor`. `out` may be one of the inputs where the types are equal.
void reduce(Types types, Reduce operation, void* out, const std::vector<const void*>& inputs,
            const std::vector<double>& factors, size_t count, size_t divisor);

}  // namespace shardwise
