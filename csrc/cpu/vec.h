// Vectors of lanes: the widest registers of the instruction set this file is compiled for.
//
// Everything here is inlined and lives in a namespace for each instruction set (FASTCAPS_NAMESPACE), so that the linker
// can never serve an AVX-512 body to a caller on a machine without it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../algebra/number.h"

#define FASTCAPS_CONCAT_(a, b) a##_##b
#define FASTCAPS_CONCAT(a, b) FASTCAPS_CONCAT_(a, b)
#define FASTCAPS_NAMESPACE FASTCAPS_CONCAT(isa, FASTCAPS_ISA)
#define FASTCAPS_INLINE inline __attribute__((always_inline))
#define FASTCAPS_LAMBDA __attribute__((always_inline))
// For long functions that do much per call: one copy for all kernels shortens the build.
#define FASTCAPS_NOINLINE __attribute__((noinline))

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class Table>
const Table& table();  // see levels.h

#if defined(__AVX512F__)
inline constexpr int kVecBytes = 64;
inline constexpr bool kManyRegisters = true;
#elif defined(__AVX2__)
inline constexpr int kVecBytes = 32;
inline constexpr bool kManyRegisters = false;
#else
inline constexpr int kVecBytes = 16;
inline constexpr bool kManyRegisters = false;
#endif

typedef float VecF __attribute__((vector_size(kVecBytes)));
typedef double VecD __attribute__((vector_size(kVecBytes)));
typedef int32_t VecI __attribute__((vector_size(kVecBytes)));
typedef int64_t VecL __attribute__((vector_size(kVecBytes)));

template <class T>
struct VecTraits;
template <>
struct VecTraits<float> {
  using Vec = VecF;
  using Int = VecI;
};
template <>
struct VecTraits<double> {
  using Vec = VecD;
  using Int = VecL;
};
template <class T>
using Vec = typename VecTraits<T>::Vec;
template <class T>
inline constexpr int kLanes = kVecBytes / int(sizeof(T));

// f(0), f(1), ... with compile-time indices: arrays indexed by them become registers.
template <int N, class F>
FASTCAPS_INLINE void unroll(F&& f) {
  [&]<int... K>(std::integer_sequence<int, K...>)
      FASTCAPS_LAMBDA { (f(std::integral_constant<int, K>{}), ...); }(std::make_integer_sequence<int, N>{});
}

template <class T>
FASTCAPS_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

template <class T>
FASTCAPS_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
FASTCAPS_INLINE void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}

// Returns x in a register and hides its origin: otherwise the compiler would load it again for each use, though loads
// are the bottleneck, or fuse its product with a sum.
template <class V>
FASTCAPS_INLINE V in_register(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

template <class V>
FASTCAPS_INLINE V max(V a, V b) {
  return a > b ? a : b;  // ignores a NaN in `a`; in softmax exp makes it NaN again
}

// Whether a comparison holds in every lane.
template <class Mask>
FASTCAPS_INLINE bool all(Mask holds) {
#if defined(__AVX512F__)
  return _mm512_cmpneq_epi64_mask((__m512i)holds, _mm512_set1_epi64(-1)) == 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)holds) == -1;
#else
  bool every = true;
  for (size_t lane = 0; lane < sizeof holds / sizeof holds[0]; ++lane) every &= holds[lane] != 0;
  return every;
#endif
}

// f of a scalar, or of every lane of a vector.
template <class T, class X, class F>
FASTCAPS_INLINE X each_lane(X x, F&& f) {
  if constexpr (std::is_same_v<X, T>) {
    return f(x);
  } else {
    T lanes[kLanes<T>];
    store<T>(lanes, x);
    for (int k = 0; k < kLanes<T>; ++k) lanes[k] = f(lanes[k]);
    return load<T>(lanes);
  }
}

inline constexpr double kLog2E = 1.44269504088896340736;  // 1 / ln 2

// 2^x for arguments <= 0 (after the maximum was taken off), to about one unit in the last place.
// 2^x = 2^n 2^r, r = x - n in [-1/2, 1/2], with a polynomial for 2^r. Adding 1.5 * 2^23 rounds x to the integer n in
// the low bits; with the exponent's bias added, these bits shifted up are 2^n. NaN stays NaN. Below kLowest the result
// is 0, exact enough beside the maximum's 1: denormal values, slow on many processors, stay out of the sums.
FASTCAPS_INLINE VecF exp2_nonpositive(VecF x) {
  const float kLowest = -115.0f, kRound = 12582912.0f + 127.0f;
  const VecF shifted = x + kRound, r = x - (shifted - kRound);
  VecF p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  for (float c : {9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f})
    p = p * r + c;
  p = p * (VecF)((VecI)shifted << 23);
  return x < kLowest ? VecF{} : p;
}

FASTCAPS_INLINE VecD exp2_nonpositive(VecD x) {
  const double kLowest = -995.0, kRound = 6755399441055744.0 + 1023.0;
  const VecD shifted = x + kRound, r = (x - (shifted - kRound)) * 0.693147180559945309417;
  VecD p = VecD{} + 1.0 / 6227020800.0;
  const double kInverseFactorials[] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
      1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  for (double c : kInverseFactorials) p = p * r + c;
  p = p * (VecD)((VecL)shifted << 52);
  return x < kLowest ? VecD{} : p;
}

// 2^x for any argument.
template <class T>
FASTCAPS_INLINE Vec<T> exp2_any(Vec<T> x) {
  const Vec<T> most = broadcast(sizeof(T) == 4 ? T(127) : T(1023));
  const Vec<T> inside = exp2_nonpositive(x > most ? most : x);
  return x > most ? broadcast(T(__builtin_inf())) : inside;
}

// ln x = k ln 2 + ln m, m in [sqrt(1/2), sqrt(2)), to about one unit in the last place, only for normal values.
FASTCAPS_INLINE VecF log_normal(VecF x) {
  const VecI k = ((VecI)x - 0x3f3504f3) >> 23;
  const VecF n = __builtin_convertvector(k, VecF), r = (VecF)((VecI)x - (k << 23)) - 1.0f, square = r * r;
  VecF p = r * 7.0376836292e-2f - 1.1514610310e-1f;
  for (float c : {1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                  -2.4999993993e-1f, 3.3333331174e-1f})
    p = p * r + c;
  return (p * r * square - n * 2.12194440e-4f - square * 0.5f) + r + n * 0.693359375f;
}

// In-register transpose of kLanes vectors: log2(kLanes) stages, each swapping blocks of 1, 2, 4, ... lanes.
template <class T, int Block>
FASTCAPS_INLINE void transpose_stage(Vec<T>* rows) {
  constexpr int n = kLanes<T>;
  unroll<n>([&](auto r) FASTCAPS_LAMBDA {
    if constexpr ((r & Block) == 0) {
      Vec<T> a = rows[r], b = rows[r + Block];
      [&]<int... K>(std::integer_sequence<int, K...>) FASTCAPS_LAMBDA {
        rows[r] = __builtin_shufflevector(a, b, ((K & Block) ? n + K - Block : K)...);
        rows[r + Block] = __builtin_shufflevector(a, b, ((K & Block) ? n + K : K + Block)...);
      }(std::make_integer_sequence<int, n>{});
    }
  });
}

template <class T>
FASTCAPS_INLINE void transpose(Vec<T>* rows) {
  constexpr int n = kLanes<T>;
  transpose_stage<T, 1>(rows);
  if constexpr (n > 2) transpose_stage<T, 2>(rows);
  if constexpr (n > 4) transpose_stage<T, 4>(rows);
  if constexpr (n > 8) transpose_stage<T, 8>(rows);
}

// The sum over lanes, always in the same order.
template <class T>
FASTCAPS_INLINE T sum_lanes(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  return lanes[0];
}

// Of 2 * Half vectors, lane r of rows[0] becomes the sum over lanes of rows[r], added up as sum_lanes does: each stage
// adds one half of the lanes to the other, and so needs half as many vectors as the one before.
template <class T, int Half = kLanes<T> / 2>
FASTCAPS_INLINE void fold_lanes(Vec<T>* rows) {
  constexpr int n = kLanes<T>;
  [&]<int... K>(std::integer_sequence<int, K...>) FASTCAPS_LAMBDA {
    unroll<Half>([&](auto r) FASTCAPS_LAMBDA {
      const Vec<T> a = rows[r], b = rows[r + Half];
      rows[r] = __builtin_shufflevector(a, b, ((K & Half) ? n + K - Half : K)...) +
                __builtin_shufflevector(a, b, ((K & Half) ? n + K : K + Half)...);
    });
  }(std::make_integer_sequence<int, n>{});
  if constexpr (Half > 1) fold_lanes<T, Half / 2>(rows);
}

// out[k] += sum over lanes of v[k], for k < count.
template <class T>
FASTCAPS_NOINLINE void add_lane_sums(const Vec<T>* v, int64_t count, T* out) {
  constexpr int n = kLanes<T>;
  for (; count >= n; count -= n, v += n, out += n) {
    Vec<T> rows[n];
    unroll<n>([&](auto r) FASTCAPS_LAMBDA { rows[r] = v[r]; });
    fold_lanes<T>(rows);
    store(out, load(out) + rows[0]);
  }
  for (; count > 0; --count) *out++ += sum_lanes<T>(*v++);
}

// Storage types. bfloat16 is the upper half of a float32; narrowing rounds to nearest even, NaN stays NaN.
struct BFloat16 {
  uint16_t bits;
};

template <class T, class S>
FASTCAPS_INLINE T widen(S x) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return T(f);
  } else {
    return T(x);
  }
}

template <class S, class T>
FASTCAPS_INLINE S narrow(T x) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return S{uint16_t((u >> 16) | 0x40u)};
    return S{uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  } else {
    return S(x);
  }
}

template <class T, class S>
FASTCAPS_INLINE Vec<T> load_as(const S* p) {
  if constexpr (std::is_same_v<S, T>) {
    return load<T>(p);
  } else {
    T wide[kLanes<T>];
    for (int k = 0; k < kLanes<T>; ++k) wide[k] = widen<T>(p[k]);
    return load<T>(wide);
  }
}

template <class S, class T>
FASTCAPS_INLINE void store_as(S* p, Vec<T> v) {
  if constexpr (std::is_same_v<S, T>) {
    store<T>(p, v);
  } else {
    T wide[kLanes<T>];
    store<T>(wide, v);
    for (int k = 0; k < kLanes<T>; ++k) p[k] = narrow<S>(wide[k]);
  }
}

}  // namespace FASTCAPS_NAMESPACE

// Number (csrc/algebra) for vectors: lane by lane.
template <class T>
struct NumberOfLanes {
  using Scalar = T;
  using Lanes = FASTCAPS_NAMESPACE::Vec<T>;
  static FASTCAPS_INLINE Lanes sqrt(Lanes x) {
    return FASTCAPS_NAMESPACE::each_lane<T>(x, [](T v) FASTCAPS_LAMBDA { return Number<T>::sqrt(v); });
  }
  static FASTCAPS_INLINE Lanes log(Lanes x) {
    return FASTCAPS_NAMESPACE::each_lane<T>(x, [](T v) { return Number<T>::log(v); });
  }
  static FASTCAPS_INLINE Lanes log_sigmoid(Lanes x) {
    return FASTCAPS_NAMESPACE::each_lane<T>(x, [](T v) { return Number<T>::log_sigmoid(v); });
  }
};
template <>
struct Number<FASTCAPS_NAMESPACE::VecF> : NumberOfLanes<float> {
  // A lane's logarithm depends on no other lane.
  static FASTCAPS_INLINE Lanes log(Lanes x) {
    const auto normal = (x >= __FLT_MIN__) & (x <= __FLT_MAX__);
    const Lanes found = FASTCAPS_NAMESPACE::log_normal(normal ? x : Lanes{} + 1);
    if (__builtin_expect(FASTCAPS_NAMESPACE::all(normal), true)) return found;
    return normal ? found : NumberOfLanes<float>::log(x);
  }
  static FASTCAPS_INLINE Lanes log_sigmoid(Lanes x) {
    const Lanes e = FASTCAPS_NAMESPACE::exp2_nonpositive((x < 0 ? x : -x) * float(FASTCAPS_NAMESPACE::kLog2E));
    const Lanes u = 1 + e;
    return (x < 0 ? x : Lanes{}) - (log(u) + (e - (u - 1)) / u);
  }
};
template <>
struct Number<FASTCAPS_NAMESPACE::VecD> : NumberOfLanes<double> {};

}  // namespace fastcaps
