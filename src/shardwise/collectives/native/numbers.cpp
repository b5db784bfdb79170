// The reduction kernels. One block at a time stays in the first-level cache as accumulators; every further input of the
// block is added to it in one pass that the compiler vectorises (the build asks for AVX2 where the processor has it).
#include "numbers.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace shardwise {
namespace {

constexpr size_t kBlock = 1024;  // accumulators: 4 KiB of fp32

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(BFloat16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }

inline BFloat16 narrow(float x, BFloat16) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(nan ? 0x7fc0 : rounded)};
}

inline float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  const uint32_t special = 0x7f800000 | ((rest & 0x3ff) << 13);       // infinite or not a number
  const uint32_t number = as_bits(as_float(rest << 13) * 0x1p112f);  // also right for subnormal numbers
  return as_float(sign | (rest >= 0x7c00 ? special : number));
}
inline Half narrow(float x, Half) {
  const uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  const uint32_t normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;     // to nearest, ties to even
  const uint32_t subnormal = as_bits(as_float(size) + 0.5f) - 0x3f000000;             // the sum rounds at the right bit
  const uint32_t large = size > 0x7f800000 ? 0x7e00 : 0x7c00;                         // from 65520 on: infinite
  const uint32_t rest = size >= 0x477ff000 ? large : size < 0x38800000 ? subnormal : normal;
  return {static_cast<uint16_t>(sign | rest)};
}

// Many at once: what the compiler makes of the functions above takes ten times as long as the processor's own conversion.
void widen_all(const Half* from, float* to, size_t count) {
  size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < count; ++i) to[i] = widen(from[i]);
}
void narrow_all(const float* from, Half* to, size_t count) {
  size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < count; ++i) to[i] = narrow(from[i], Half{});
}

inline uint8_t widen(Bool x) { return x.bits != 0; }
inline Bool narrow(uint8_t x, Bool) { return {static_cast<uint8_t>(x != 0)}; }

template <class T>
inline T widen(T x) {
  return x;
}
template <class T>
inline T narrow(T x, T) {
  return x;
}

template <class T>
using Accumulator = decltype(widen(std::declval<T>()));

// Sums of integers wrap around as they do in torch; in C++ only those of unsigned numbers may.
template <class A>
inline A plus(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}
template <class A>
inline A times(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

// A number of ranks may be more than an element of 8 bits can hold.
template <class A>
inline A divided(A sum, size_t divisor) {
  using Wide = std::conditional_t<std::is_integral_v<A>, int64_t, A>;
  return static_cast<A>(static_cast<Wide>(sum) / static_cast<Wide>(divisor));
}

// Not a number wins, whoever brings it.
template <class A>
inline A lesser(A a, A b) {
  return (a < b || a != a) ? a : b;
}
template <class A>
inline A greater(A a, A b) {
  return (a > b || a != a) ? a : b;
}

template <Reduce R, class A>
inline A combine(A a, A b) {
  if constexpr (R == Reduce::product) return times(a, b);
  if constexpr (R == Reduce::min) return lesser(a, b);
  if constexpr (R == Reduce::max) return greater(a, b);
  if constexpr (std::is_integral_v<A>) {
    if constexpr (R == Reduce::bit_and) return a & b;
    if constexpr (R == Reduce::bit_or) return a | b;
    if constexpr (R == Reduce::bit_xor) return a ^ b;
  }
  return plus(a, b);
}

// Reads two inputs in the first pass and writes the output in the last one, so that two ranks need one pass. Inputs and
// output are one memory or apart, never shifted against each other, which `ivdep` tells the compiler.
template <Reduce R, class T, class Out>
void block(Out* out, const std::vector<const void*>& inputs, const std::vector<double>& factors, size_t at, size_t count,
           size_t divisor) {
  using A = Accumulator<T>;
  const size_t ranks = inputs.size();
  const auto input = [&](size_t rank) { return static_cast<const T*>(inputs[rank]) + at; };
  const auto factor = [&](size_t rank) { return R == Reduce::scaled_sum ? static_cast<A>(factors[rank]) : A(1); };
  const auto value = [](const T& x, A by) {
    return R == Reduce::scaled_sum ? times(static_cast<A>(widen(x)), by) : static_cast<A>(widen(x));
  };
  const auto finished = [divisor](A sum) {
    if constexpr (R == Reduce::average) sum = divided(sum, divisor);
    return narrow(sum, Out{});
  };
  A sums[kBlock];
  const T *first = input(0), *second = ranks > 1 ? input(1) : nullptr;
  const A by = factor(0), and_by = ranks > 1 ? factor(1) : by;
  Out* to = out + at;
  if (ranks == 1) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) to[i] = finished(value(first[i], by));
  } else if (ranks == 2) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) to[i] = finished(combine<R>(value(first[i], by), value(second[i], and_by)));
  } else {
    for (size_t i = 0; i < count; ++i) sums[i] = combine<R>(value(first[i], by), value(second[i], and_by));
    for (size_t rank = 2; rank < ranks; ++rank) {
      const T* in = input(rank);
      const A scale = factor(rank);
      if (rank + 1 < ranks) {
        for (size_t i = 0; i < count; ++i) sums[i] = combine<R>(sums[i], value(in[i], scale));
      } else {
#pragma GCC ivdep
        for (size_t i = 0; i < count; ++i) to[i] = finished(combine<R>(sums[i], value(in[i], scale)));
      }
    }
  }
}

template <Reduce R, class T, class Out>
void blocks(void* out, const std::vector<const void*>& inputs, const std::vector<double>& factors, size_t count,
            size_t divisor) {
  for (size_t at = 0; at < count; at += kBlock) {
    block<R, T>(static_cast<Out*>(out), inputs, factors, at, std::min(kBlock, count - at), divisor);
  }
}

// Inputs or output in fp16: a block of each is converted as a whole, and added in fp32.
template <Reduce R, class T, class Out>
void blocks_of_halves(void* out, const std::vector<const void*>& inputs, const std::vector<double>& factors, size_t count,
                      size_t divisor) {
  constexpr bool from_halves = std::is_same_v<T, Half>, to_halves = std::is_same_v<Out, Half>;
  std::vector<float> wide(from_halves ? inputs.size() * kBlock : 0);
  std::vector<const void*> parts(inputs.size());
  float sums[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t length = std::min(kBlock, count - at);
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      const T* const input = static_cast<const T*>(inputs[rank]) + at;
      parts[rank] = from_halves ? static_cast<const void*>(wide.data() + rank * kBlock) : input;
      if constexpr (from_halves) widen_all(input, wide.data() + rank * kBlock, length);
    }
    Out* const to = static_cast<Out*>(out) + at;
    if constexpr (to_halves) {
      block<R, float>(sums, parts, factors, 0, length, divisor);
      narrow_all(sums, to, length);
    } else {
      block<R, float>(to, parts, factors, 0, length, divisor);
    }
  }
}

template <Reduce R, class T, class Out>
void blocks_as(void* out, const std::vector<const void*>& inputs, const std::vector<double>& factors, size_t count,
               size_t divisor) {
  constexpr bool halves = std::is_same_v<T, Half> || std::is_same_v<Out, Half>;
  if constexpr (halves) return blocks_of_halves<R, T, Out>(out, inputs, factors, count, divisor);
  else return blocks<R, T, Out>(out, inputs, factors, count, divisor);
}

template <class T, class Out = T>
void reduce_as(Reduce operation, void* out, const std::vector<const void*>& inputs, const std::vector<double>& factors,
               size_t count, size_t divisor) {
  const auto run = [&](auto blocks_of) { blocks_of(out, inputs, factors, count, divisor); };
  switch (operation) {
    case Reduce::average: return run(blocks_as<Reduce::average, T, Out>);
    case Reduce::product: return run(blocks_as<Reduce::product, T, Out>);
    case Reduce::min: return run(blocks_as<Reduce::min, T, Out>);
    case Reduce::max: return run(blocks_as<Reduce::max, T, Out>);
    case Reduce::bit_and: return run(blocks_as<Reduce::bit_and, T, Out>);
    case Reduce::bit_or: return run(blocks_as<Reduce::bit_or, T, Out>);
    case Reduce::bit_xor: return run(blocks_as<Reduce::bit_xor, T, Out>);
    case Reduce::scaled_sum: return run(blocks_as<Reduce::scaled_sum, T, Out>);
    default: return run(blocks_as<Reduce::sum, T, Out>);
  }
}

// fp16 and bf16: to and from their sums in fp32 too.
template <class T>
void reduce_short(Types types, Reduce operation, void* out, const std::vector<const void*>& inputs,
                  const std::vector<double>& factors, size_t count, size_t divisor) {
  if (types.from == types.to) return reduce_as<T>(operation, out, inputs, factors, count, divisor);
  if (types.to == Number::f32) return reduce_as<T, float>(operation, out, inputs, factors, count, divisor);
  return reduce_as<float, T>(operation, out, inputs, factors, count, divisor);
}

// A sum of truth values is whether one is true, a product whether all are: what they are in torch.
Reduce of_truth(Reduce operation) {
  if (operation == Reduce::sum) return Reduce::max;
  return operation == Reduce::product ? Reduce::min : operation;
}

bool is_float(Number number) { return static_cast<uint32_t>(number) <= static_cast<uint32_t>(Number::bf16); }

}  // namespace

const char* name(Number number) {
  static const char* const names[] = {"float32", "float64", "float16", "bfloat16", "int8", "uint8",
                                      "int16",   "int32",   "int64",   "bool",     "other"};
  return names[static_cast<uint32_t>(number)];
}

const char* name(Reduce reduce) {
  static const char* const names[] = {"sum",         "avg",        "product",     "min",        "max",
                                      "bitwise and", "bitwise or", "bitwise xor", "scaled sum", "none"};
  return names[static_cast<uint32_t>(reduce)];
}

size_t bytes_of(Number number) {
  static const size_t sizes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 0};
  return sizes[static_cast<uint32_t>(number)];
}

const char* refusal(Number number, Reduce reduce) {
  const bool bitwise = reduce == Reduce::bit_and || reduce == Reduce::bit_or || reduce == Reduce::bit_xor;
  if (number == Number::other) return "tensors of this dtype can be moved but not reduced";
  if (bitwise && is_float(number)) return "bitwise operations are for integers";
  if (reduce == Reduce::scaled_sum && !is_float(number)) return "a premultiplied sum is for floating point";
  if (reduce == Reduce::average && number == Number::boolean) return "truth values have no average";
  return nullptr;
}

Number accumulator(Number number) {
  return number == Number::f16 || number == Number::bf16 ? Number::f32 : number;
}

void reduce(Types types, Reduce operation, void* out, const std::vector<const void*>& inputs,
            const std::vector<double>& factors, size_t count, size_t divisor) {
  const auto run = [&](auto reduce_of) { reduce_of(operation, out, inputs, factors, count, divisor); };
  switch (types.from == Number::f32 ? types.to : types.from) {
    case Number::f32: return run(reduce_as<float, float>);
    case Number::f64: return run(reduce_as<double, double>);
    case Number::f16: return reduce_short<Half>(types, operation, out, inputs, factors, count, divisor);
    case Number::bf16: return reduce_short<BFloat16>(types, operation, out, inputs, factors, count, divisor);
    case Number::i8: return run(reduce_as<int8_t, int8_t>);
    case Number::u8: return run(reduce_as<uint8_t, uint8_t>);
    case Number::i16: return run(reduce_as<int16_t, int16_t>);
    case Number::i32: return run(reduce_as<int32_t, int32_t>);
    case Number::i64: return run(reduce_as<int64_t, int64_t>);
    case Number::boolean: operation = of_truth(operation); return run(reduce_as<Bool, Bool>);
    case Number::other: break;  // refused before
  }
}

}  // namespace shardwise
