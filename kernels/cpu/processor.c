/* What this processor runs: the level of the library of kernels that is right for it, where a package has several
 * (`minillm/backends/cpu/prebuilt.py` names the levels).
 *
 * Processors of x86-64: 1 for x86-64-v2, 2 for v3 (AVX2), 3 for v4 (AVX-512), 4 for v4 with VNNI; of AArch64: 1 for any,
 * 2 with dot products of integers, 3 with their products of matrices (i8mm) too; 0 for any other. The library of level 1
 * is asked.
 *
 * The processor says itself what it has, and the system which registers it saves: a list of the system's, such as
 * /proc/cpuinfo, may be another processor's where this one is emulated. On macOS registers of AVX-512 are said to be saved
 * only once they have been used: level 2.
 *
 * Source: x86-64 psABI 1.0, table 3.1 (levels); Intel's Software Developer's Manual, volume 2, CPUID and XGETBV.
 */
#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>

#define BIT(n) (1u << (n))

/* Words of CPUID, and of XCR0: which registers the system saves. */
static const uint32_t
    V2 = BIT(0) | BIT(9) | BIT(13) | BIT(19) | BIT(20) | BIT(23), /* SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT */
    V2_EXTENDED = BIT(0),                                         /* LAHF */
    V3 = BIT(12) | BIT(22) | BIT(27) | BIT(28) | BIT(29),         /* FMA, MOVBE, OSXSAVE, AVX, F16C */
    V3_EXTENDED = BIT(5),                                         /* LZCNT */
    V3_MORE = BIT(3) | BIT(5) | BIT(8),                           /* BMI1, AVX2, BMI2 */
    V3_SAVED = BIT(1) | BIT(2),                                   /* xmm, ymm */
    V4_MORE = BIT(16) | BIT(17) | BIT(28) | BIT(30) | BIT(31),    /* AVX512F, DQ, CD, BW, VL */
    V4_SAVED = V3_SAVED | BIT(5) | BIT(6) | BIT(7),               /* masks, zmm */
    VNNI = BIT(11);                                               /* AVX512_VNNI */

static int has(uint32_t word, uint32_t all) {
    return (word & all) == all;
}

int64_t processor_level(void) {
    uint32_t a, b, d, features, extended, more, more_c, saved;
    if (!__get_cpuid(1, &a, &b, &features, &d) || !__get_cpuid(0x80000001, &a, &b, &extended, &d)) return 0;
    if (!has(features, V2) || !has(extended, V2_EXTENDED)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &more, &more_c, &d)) return 1;
    if (!has(features, V3) || !has(extended, V3_EXTENDED) || !has(more, V3_MORE)) return 1;
    __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (!has(saved, V3_SAVED)) return 1;
    if (!has(more, V4_MORE) || !has(saved, V4_SAVED)) return 2;
    return has(more_c, VNNI) ? 4 : 3;
}

#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

int64_t processor_level(void) {
#if defined(__APPLE__)
    int has = 0; /* stays 0 where the system knows no such name */
    size_t size = sizeof has;
    sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, NULL, 0);
    return has ? 3 : 2; /* every one of Apple's that macOS runs on has dot products */
#elif defined(__linux__)
    if (!(getauxval(AT_HWCAP) & 1 << 20)) return 1; /* ASIMDDP */
    return getauxval(AT_HWCAP2) & 1 << 13 ? 3 : 2;  /* I8MM */
#else
    return 1;
#endif
}

#else
int64_t processor_level(void) {
    return 0;
}
#endif
