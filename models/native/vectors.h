/* Vectors of float32 in GCC's and Clang's own notation, so that one source serves AVX2 and
   AVX-512. */
#ifndef VECTORS_H
#define VECTORS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include "native.h"

#ifndef LANES /* named to the compiler for answers alone: build.py */
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif
#ifndef ALWAYS_INLINE
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#endif
/* A loop that has all registers: inlined into a large function it is up to 6 % slower. */
#define NEVER_INLINE static __attribute__((noinline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef double dvec __attribute__((vector_size(LANES * 8)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves
    __attribute__((vector_size(LANES * 2))); /* bfloat16 values: the upper half of a float32 */

ALWAYS_INLINE vec load(const float *from)
{
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

ALWAYS_INLINE void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

ALWAYS_INLINE uvec widened(halves value)
{
#ifdef __AVX512F__ /* one instruction, where compilers make four */
    return (uvec)_mm512_cvtepu16_epi32((__m256i)value);
#else
    return __builtin_convertvector(value, uvec);
#endif
}

ALWAYS_INLINE vec from_bfloat16(halves value) { return (vec)(widened(value) << 16); }

/* Rounded to nearest, ties to even. */
ALWAYS_INLINE halves to_bfloat16(vec value)
{
#ifdef __AVX512BF16__
    return (halves)_mm512_cvtneps_pbh((__m512)value);
#else
    uvec bits = (uvec)value;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves);
#endif
}

/* Asks for what comes 2 KB after element `at`: rows are short, and a CPU's own prefetch stops at
   each page. */
#define prefetch(map, at, dtype, write) \
    __builtin_prefetch( \
        (const void *)((uintptr_t)(map) + (at) * ((dtype) == FLOAT32 ? 4 : 2) + 2048), write)

/* Reads `n` values of a map from element `at` on, n <= LANES; lanes beyond them are 0. */
ALWAYS_INLINE vec load_values(const void *map, size_t at, int n, int dtype)
{
    const float *floats = (const float *)map + at;
    const uint16_t *shorts = (const uint16_t *)map + at;
    vec value = {0};
    halves some = {0};
    if (n == LANES && dtype == FLOAT32)
        return load(floats);
    if (n == LANES) {
        memcpy(&some, shorts, sizeof some);
        return from_bfloat16(some);
    }
#ifdef __AVX512F__ /* a copy of so few would wait for its own stores */
    __mmask16 lanes = (__mmask16)((1u << n) - 1);
    if (dtype == FLOAT32)
        return (vec)_mm512_maskz_loadu_ps(lanes, floats);
    return from_bfloat16((halves)_mm256_maskz_loadu_epi16(lanes, shorts));
#endif
    if (dtype == FLOAT32) {
        memcpy(&value, floats, sizeof(float) * n);
        return value;
    }
    memcpy(&some, shorts, sizeof(uint16_t) * n);
    return from_bfloat16(some);
}

ALWAYS_INLINE vec load_some(const float *from, int n) { return load_values(from, 0, n, FLOAT32); }

/* Writes `n` values, n <= LANES; returns them as they were written: rounded where the map is
   bfloat16. */
ALWAYS_INLINE vec store_values(void *map, size_t at, vec value, int n, int dtype)
{
    float *floats = (float *)map + at;
    uint16_t *shorts = (uint16_t *)map + at;
    halves rounded = to_bfloat16(value);
    if (n == LANES && dtype == FLOAT32)
        memcpy(floats, &value, sizeof value);
    else if (n == LANES)
        memcpy(shorts, &rounded, sizeof rounded);
#ifdef __AVX512F__
    else if (dtype == FLOAT32)
        _mm512_mask_storeu_ps(floats, (__mmask16)((1u << n) - 1), (__m512)value);
    else
        _mm256_mask_storeu_epi16(shorts, (__mmask16)((1u << n) - 1), (__m256i)rounded);
#else
    else if (dtype == FLOAT32)
        memcpy(floats, &value, sizeof(float) * n);
    else
        memcpy(shorts, &rounded, sizeof(uint16_t) * n);
#endif
    return dtype == FLOAT32 ? value : from_bfloat16(rounded);
}

ALWAYS_INLINE vec keep_where(ivec condition, vec value) { return (vec)(condition & (ivec)value); }

ALWAYS_INLINE vec choose(ivec condition, vec yes, vec no)
{
    return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

/* The larger one; a NaN stays one: of two that do not compare, the instruction takes the second. */
ALWAYS_INLINE vec at_least(vec value, vec floor)
{
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)floor, (__m512)value);
#elif !defined __AVX__
    return choose(floor > value, floor, value);
#else
    return (vec)_mm256_max_ps((__m256)floor, (__m256)value);
#endif
}

#endif
