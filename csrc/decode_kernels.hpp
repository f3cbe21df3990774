// Arithmetic of one decoding step on plain memory. Included once per instruction set by decode.cpp, in a namespace of its own.
//
// Decisions
// - All sums run over 16 lanes and then over a fixed tree, whatever the instruction set and however many rows there are: a row's
//   numbers do not depend, to the bit, on what else is in the batch. (Between instruction sets only fused multiply-adds differ.)
// - A matrix is read once per call: a few of its rows are multiplied with all rows of x while they are in the cache.
//
// Weights are fp32 or bf16; keys and values fp32, bf16, or int8 with one scale per head and token; everything else is fp32.

inline v16 load(const float *p) {
    v16 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline v16 load(const bf16 *p) {
    typedef std::uint16_t u16x16 __attribute__((vector_size(32)));
    typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
    u16x16 half;
    std::memcpy(&half, p, sizeof half);
    u32x16 wide = __builtin_convertvector(half, u32x16) << 16;
    v16 x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

inline v16 load(const std::int8_t *p) {
    typedef std::int8_t i8x16 __attribute__((vector_size(16)));
    i8x16 x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, v16);
}

inline void store(float *p, v16 x) { std::memcpy(p, &x, sizeof x); }

inline float value(float x) { return x; }
inline float value(bf16 x) {
    std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}
inline float value(std::int8_t x) { return float(x); }

// lane i and i + 8, then i + 4, i + 2, i + 1
inline float sum(v16 x) {
#ifdef HAS_SHUFFLE
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
#else
    float lane[16];
    std::memcpy(lane, &x, sizeof x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
#endif
}

// out[r][b] = w[r] . x[b] for R rows of w and B rows of x, n numbers each
template <int R, int B, class W> inline void dots(const W *w, const float *x, std::size_t x_stride, int n, float (&out)[4][4]) {
    v16 total[R][B] = {};
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 from_x[B];
        for (int b = 0; b < B; ++b) from_x[b] = load(x + b * x_stride + i);
        for (int r = 0; r < R; ++r) {
            v16 from_w = load(w + std::size_t(r) * n + i);
            __builtin_prefetch(w + std::size_t(r + R) * n + i);  // the next rows: a tenth faster than the processor by itself
            for (int b = 0; b < B; ++b) total[r][b] += from_w * from_x[b];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) {
            float rest = 0;
            for (int j = i; j < n; ++j) rest += value(w[std::size_t(r) * n + j]) * x[b * x_stride + j];
            out[r][b] = sum(total[r][b]) + rest;
        }
}

template <int R, class W> inline void dots_any(int B, const W *w, const float *x, std::size_t x_stride, int n, float (&out)[4][4]) {
    if (B == 4) dots<R, 4>(w, x, x_stride, n, out);
    else if (B == 3) dots<R, 3>(w, x, x_stride, n, out);
    else if (B == 2) dots<R, 2>(w, x, x_stride, n, out);
    else dots<R, 1>(w, x, x_stride, n, out);
}

// give(row of w, row of x, w[row] . x[row]) for rows begin .. end of w and all B rows of x
template <class W, class Give>
inline void product(const void *weight, int begin, int end, int n, const float *x, std::size_t x_stride, int B, Give give) {
    const W *w = static_cast<const W *>(weight);
    float out[4][4];
    for (int row = begin; row < end;) {
        int rows = end - row >= 4 ? 4 : 1;
        for (int first = 0; first < B; first += 4) {
            int some = B - first < 4 ? B - first : 4;
            const W *from = w + std::size_t(row) * n;
            if (rows == 4) dots_any<4>(some, from, x + first * x_stride, x_stride, n, out);
            else dots_any<1>(some, from, x + first * x_stride, x_stride, n, out);
            for (int r = 0; r < rows; ++r)
                for (int b = 0; b < some; ++b) give(row + r, first + b, out[r][b]);
        }
        row += rows;
    }
}

inline float dot(const float *a, const float *b, int n) {
    float out[4][4];
    dots<1, 1>(a, b, 0, n, out);
    return out[0][0];
}

// e^x for x <= 0 (Cephes' polynomial, relative error below 2e-7)
inline v16 exp_of(v16 x) {
    typedef std::int32_t i32x16 __attribute__((vector_size(64)));
    const v16 lowest = v16{} - 87.0f;
    x = x < lowest ? lowest : x;
    i32x16 whole = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, i32x16);  // towards zero: the nearest, as x <= 0
    v16 n = __builtin_convertvector(whole, v16);
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16 y = v16{} + 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x + 1.0f;
    i32x16 scale = (whole + 127) << 23;
    v16 power;
    std::memcpy(&power, &scale, sizeof power);
    return y * power;
}

// y = x / sqrt(mean(x^2) + epsilon) * weight, or the same of x - mean, plus bias
inline void norm(const float *x, const float *weight, const float *bias, bool centred, float epsilon, int n, float *y) {
    float mean = 0;
    if (centred) {
        for (int i = 0; i < n; ++i) mean += x[i];
        mean /= n;
    }
    v16 squares = {};
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 some = load(x + i) - mean;
        squares += some * some;
    }
    float total = sum(squares);
    for (; i < n; ++i) total += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / std::sqrt(total / n + epsilon);
    for (i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

// channel i turns with channel i + half
inline void turn(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; ++i) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

inline float activated(float x, Activation kind) {
    switch (kind) {
    case Activation::gelu: return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
    case Activation::gelu_tanh: return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case Activation::relu_squared: return x > 0 ? x * x : 0.0f;
    default: return x / (1.0f + std::exp(-x));
    }
}

// Softmax attention of one query over num keys; scores: room for num rounded up to 16. key i has scale key_scales[i] where those are given.
template <class C>
inline void attend(const float *q, const C *keys, const C *values, const float *key_scales, const float *value_scales, int num, int size,
                   float scale, float *scores, float *out) {
    float found[4][4], largest = -INFINITY;
    for (int key = 0; key < num;) {
        int some = num - key >= 4 ? 4 : 1;
        if (some == 4) dots<4, 1>(keys + std::size_t(key) * size, q, 0, size, found);
        else dots<1, 1>(keys + std::size_t(key) * size, q, 0, size, found);
        for (int i = 0; i < some; ++i) {
            float score = found[i][0] * scale * (key_scales ? key_scales[key + i] : 1.0f);
            scores[key + i] = score;
            largest = score > largest ? score : largest;
        }
        key += some;
    }
    int padded = (num + 15) / 16 * 16;
    for (int key = num; key < padded; ++key) scores[key] = -INFINITY;
    v16 all = {};
    for (int key = 0; key < padded; key += 16) {
        v16 some = load(scores + key);
        v16 weight = exp_of(some - largest);
        weight = some == -INFINITY ? v16{} : weight;
        all += weight;
        store(scores + key, weight);
    }
    float share = 1.0f / sum(all);
    int d = 0;
    for (; d + 16 <= size; d += 16) {
        v16 total = {};
        for (int key = 0; key < num; ++key)
            total += load(values + std::size_t(key) * size + d) * (scores[key] * (value_scales ? value_scales[key] : 1.0f));
        store(out + d, total * share);
    }
    for (; d < size; ++d) {
        float total = 0;
        for (int key = 0; key < num; ++key)
            total += value(values[std::size_t(key) * size + d]) * (scores[key] * (value_scales ? value_scales[key] : 1.0f));
        out[d] = total * share;
    }
}

// a head's numbers into the cache
inline void keep(const float *x, float *to, float *, int n) { std::memcpy(to, x, n * sizeof(float)); }
inline void keep(const float *x, bf16 *to, float *, int n) {
    for (int i = 0; i < n; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        to[i].bits = std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, ties to even
    }
}
inline void keep(const float *x, std::int8_t *to, float *scale, int n) {
    float largest = 0;
    for (int i = 0; i < n; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
    *scale = largest / 127.0f;
    float by = *scale > FLT_MIN ? *scale : FLT_MIN;
    for (int i = 0; i < n; ++i) to[i] = std::int8_t(std::nearbyint(x[i] / by));
}

template <class W, class C> void run(const Model &m, const Step &s, Team &team, int thread) {
    const int B = int(s.tokens.size()), H = m.hidden, D = m.head_dim, N = m.heads, K = m.groups, F = m.ffn, group = N / K;
    const int width = (N + 2 * K) * D;
    Work &work = *s.work;
    float *x = work.x.data(), *qkv = work.qkv.data(), *attended = work.attended.data(), *hidden = work.hidden.data();
    float *normed = work.normed[thread].data(), *scores = work.scores[thread].data();
    auto norm_all = [&](const float *weight, const float *bias) {
        for (int b = 0; b < B; ++b) norm(x + std::size_t(b) * H, weight, bias, m.centred, m.epsilon, H, normed + std::size_t(b) * H);
    };
    Phase *phase = s.phases;
    team.share(*phase++, 1, 1, [&](int, int) {
        for (int b = 0; b < B; ++b)
            for (int i = 0; i < H; ++i) {
                x[std::size_t(b) * H + i] = value(static_cast<const W *>(m.word)[std::size_t(s.tokens[b]) * H + i]);
                if (m.position) x[std::size_t(b) * H + i] += m.position[std::size_t(s.positions[b]) * H + i];
            }
    });
    for (std::size_t number = 0; number < m.layers.size(); ++number) {
        const Layer &layer = m.layers[number];
        const CachePart &cache = s.cache[number];
        bool is_normed = false;  // by this thread, once it has a part of what follows
        team.share(*phase++, width, team.part(width), [&](int first, int last) {
            if (!is_normed) norm_all(layer.attention_norm, layer.attention_norm_bias);
            is_normed = true;
            product<W>(layer.qkv, first, last, H, normed, H, B, [&](int row, int b, float y) {
                qkv[std::size_t(b) * width + row] = y + (layer.qkv_bias ? layer.qkv_bias[row] : 0.0f);
            });
        });
        team.share(*phase++, B * K, 1, [&](int task, int) {  // a key/value head of a row with its queries
            int b = task / K, g = task % K;
            float *q = qkv + std::size_t(b) * width + g * group * D, *k = qkv + std::size_t(b) * width + (N + g) * D, *v = k + K * D;
            const float *cos = m.cos + std::size_t(s.positions[b]) * m.half, *sin = m.sin + std::size_t(s.positions[b]) * m.half;
            for (int head = 0; head <= group; ++head) {
                float *some = head < group ? q + head * D : k;
                const float *weight = head < group ? layer.q_norm : layer.k_norm;
                if (weight) norm(some, weight, nullptr, false, m.epsilon, D, some);
                if (m.half) turn(some, cos, sin, m.half);
            }
            std::size_t line = (std::size_t(b) * K + g) * s.slots, slot = line + s.positions[b] % s.slots;
            C *keys = static_cast<C *>(cache.keys), *values = static_cast<C *>(cache.values);
            keep(k, keys + slot * D, cache.key_scales + (cache.key_scales ? slot : 0), D);
            keep(v, values + slot * D, cache.value_scales + (cache.value_scales ? slot : 0), D);
            int end = s.positions[b] + 1 < s.slots ? s.positions[b] + 1 : s.slots;
            int begin = m.window && end > m.window ? end - m.window : 0;  // a ring has no more slots than the window
            const float *key_scales = cache.key_scales ? cache.key_scales + line + begin : nullptr;
            const float *value_scales = cache.value_scales ? cache.value_scales + line + begin : nullptr;
            for (int head = 0; head < group; ++head)
                attend<C>(q + head * D, keys + (line + begin) * D, values + (line + begin) * D, key_scales, value_scales, end - begin, D,
                          1.0f / std::sqrt(float(D)), scores, attended + (std::size_t(b) * N + g * group + head) * D);
        });
        team.share(*phase++, H, team.part(H), [&](int first, int last) {
            product<W>(layer.out, first, last, N * D, attended, std::size_t(N) * D, B, [&](int row, int b, float y) {
                x[std::size_t(b) * H + row] += y + (layer.out_bias ? layer.out_bias[row] : 0.0f);
            });
        });
        is_normed = false;
        team.share(*phase++, F, team.part(F), [&](int first, int last) {
            if (!is_normed) norm_all(layer.mlp_norm, layer.mlp_norm_bias);
            is_normed = true;
            product<W>(layer.up, first, last, H, normed, H, B, [&](int row, int b, float y) {
                hidden[std::size_t(b) * F + row] = activated(y + (layer.up_bias ? layer.up_bias[row] : 0.0f), m.activation);
            });
            if (!m.gated) return;
            product<W>(static_cast<const W *>(layer.up) + std::size_t(F) * H, first, last, H, normed, H, B, [&](int row, int b, float y) {
                hidden[std::size_t(b) * F + row] *= y + (layer.up_bias ? layer.up_bias[F + row] : 0.0f);
            });
        });
        team.share(*phase++, H, team.part(H), [&](int first, int last) {
            product<W>(layer.down, first, last, F, hidden, F, B, [&](int row, int b, float y) {
                x[std::size_t(b) * H + row] += y + (layer.down_bias ? layer.down_bias[row] : 0.0f);
            });
        });
    }
    bool is_normed = false;
    team.share(*phase++, m.vocab, team.part(m.vocab), [&](int first, int last) {
        if (!is_normed) norm_all(m.norm, m.norm_bias);
        is_normed = true;
        product<W>(m.head, first, last, H, normed, H, B, [&](int row, int b, float y) { s.logits[std::size_t(b) * m.vocab + row] = y; });
    });
}
