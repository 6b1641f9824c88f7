// Philox4x32-10: the random numbers of minillm/reference/philox.py, word for word.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
#pragma once

// Scramble the counter under the key; both change.
__device__ __forceinline__ void philox4x32(unsigned counter[4], unsigned key[2]) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned long long product0 = 0xD2511F53ull * counter[0], product1 = 0xCD9E8D57ull * counter[2];
        counter[0] = (unsigned)(product1 >> 32) ^ counter[1] ^ key[0];
        counter[1] = (unsigned)product1;
        counter[2] = (unsigned)(product0 >> 32) ^ counter[3] ^ key[1];
        counter[3] = (unsigned)product0;
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
}

// The uniform number of a key as a whole number n: the uniform is n / 2^24, n odd, so never 0 and never 1.
__device__ __forceinline__ unsigned uniform_24(unsigned long long seed, unsigned sequence, unsigned position,
                                               unsigned purpose) {
    unsigned counter[4] = {position, sequence, purpose, 0};
    unsigned key[2] = {(unsigned)seed, (unsigned)(seed >> 32)};
    philox4x32(counter, key);
    return 2 * (counter[0] >> 9) + 1;
}
