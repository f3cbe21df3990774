// NumPy's legacy shuffle, number for number: `RandomState(seed).shuffle(x)` of a one-dimensional array.
//
// The order of the training data is defined by it (megalite/data/gpt_index.py), and NumPy promises never to change it.
// Generator: MT19937 (Matsumoto and Nishimura 1998) with the plain seeding by multiplication. Shuffle: Fisher-Yates from
// the end; a position in [0, i] is a 32-bit word (64 above 2^32 - 1) under the smallest mask of ones, drawn again while
// it is above i.
//
// The time of a shuffle is the time of its cache misses. Which elements are swapped does not depend on the elements, so
// positions are drawn a block ahead and their cache lines are fetched meanwhile.

#pragma once

#include <array>
#include <cstdint>
#include <utility>

class LegacyRandom {
public:
    explicit LegacyRandom(uint32_t seed) {
        for (uint32_t i = 0; i < kSize; ++i) {
            state_[i] = seed;
            seed = 1812433253U * (seed ^ (seed >> 30)) + i + 1;
        }
    }

    uint32_t next32() {
        if (next_ == kSize) refill();
        return output_[next_++];
    }

    uint64_t next64() {
        const uint64_t high = next32();
        return high << 32 | next32();
    }

    template <typename T>
    void shuffle(T* values, int64_t size) {
        Block blocks[2];
        int64_t top = size - 1;  // the next element to be swapped away
        int current = 0;
        draw(blocks[current], top, values);
        while (blocks[current].count > 0) {
            draw(blocks[1 - current], top - blocks[current].count, values);
            for (int n = 0; n < blocks[current].count; ++n, --top) std::swap(values[top], values[blocks[current].chosen[n]]);
            current = 1 - current;
        }
    }

private:
    static constexpr uint32_t kSize = 624, kShift = 397;
    static constexpr int kBlock = 64;

    struct Block {
        int count = 0;
        std::array<int64_t, kBlock + 1> chosen;  // one more: a rejected draw is written and then overwritten
    };

    // Positions for the elements top, top - 1, ... as long as their masks agree; none when nothing is left to swap.
    template <typename T>
    void draw(Block& block, int64_t top, const T* values) {
        block.count = 0;
        if (top < 1) return;
        uint64_t mask = static_cast<uint64_t>(top);
        for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
        const auto last = static_cast<int64_t>(mask >> 1);  // below it the mask is smaller
        const bool wide = mask > 0xffffffffU;
        const int most = static_cast<int>(top - last < kBlock ? top - last : kBlock);
        int count = 0;
        while (count < most) {
            const auto drawn = static_cast<int64_t>((wide ? next64() : next32()) & mask);
            block.chosen[count] = drawn;
#if defined(__GNUC__)
            __builtin_prefetch(values + drawn, 1);
#endif
            count += drawn <= top - count;  // without a branch: about one draw in four is rejected, at random
        }
        block.count = count;
    }

    void refill() {
        const auto twist = [this](uint32_t i, uint32_t follower, uint32_t far) {
            const uint32_t mixed = (state_[i] & 0x80000000U) | (state_[follower] & 0x7fffffffU);
            state_[i] = state_[far] ^ (mixed >> 1) ^ (-(mixed & 1U) & 0x9908b0dfU);
        };
        for (uint32_t i = 0; i < kSize - kShift; ++i) twist(i, i + 1, i + kShift);
        for (uint32_t i = kSize - kShift; i < kSize - 1; ++i) twist(i, i + 1, i + kShift - kSize);
        twist(kSize - 1, 0, kShift - 1);
        for (uint32_t i = 0; i < kSize; ++i) {
            uint32_t word = state_[i];
            word ^= word >> 11;
            word ^= (word << 7) & 0x9d2c5680U;
            word ^= (word << 15) & 0xefc60000U;
            output_[i] = word ^ (word >> 18);
        }
        next_ = 0;
    }

    std::array<uint32_t, kSize> state_, output_;
    uint32_t next_ = kSize;
};
