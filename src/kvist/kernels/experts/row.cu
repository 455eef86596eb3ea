// The experts' half of a layer for one row in one launch, for Hopper (sm_90a): needs `device/stream.cuh`, `hyper_connections/collapse.cuh`.
//
// Every block norms and quantises the row, then takes equal runs of chunks of the shared expert's gate+up, of the chosen experts'
// gate+up, and of all downs. Logits of the router are made by all blocks before the first run and the choice is made by a warp of each
// while the first run is read, so that weights keep coming. Panels that blocks share are finished by the block that begins them,
// from the others' parts in their order; downs are left as parts for the next pass: bits never depend on timing. All blocks must be on
// the card at once. Knows no layers.

static const int WARPS = 12;  // that multiply
static const int STAGES = 2;
static const int STAGE = CODES + FP4_SCALES;
static const int THREADS = 32 * (WARPS + 1);  // one warp chooses
static const int MOST_EXPERTS = 384;
static const int MOST_CHOSEN = 16;
static const int MOST_GATES = 3;     // rows of the router a block

struct Call {
  const u16* gate;  // [E, D]
  const float* bias_text;
  const float* bias_image;
  const u8* text;   // whether the row is text
  const u8* up_codes;  // paired FP4 panels of all experts
  const u8* up_scales;
  const u8* down_codes;
  const u8* down_scales;
  const u8* shared_up_codes;  // FP8
  const u32* shared_up_scales;
  const u8* shared_down_codes;
  const u32* shared_down_scales;
  float* logits;        // [E]
  float* shared_parts;  // [blocks, 64]
  float* routed_parts;
  u16* hidden;          // [K + 1, F]
  float* out;           // parts [most, D]
  i64* ids;             // [K]
  float* weights;
  u32* counters;        // logits, panels, exits, then two flags a block: zero before and after
  Streams streams;
  int width, hidden_width, experts, chosen, blocks, shared_share, routed_share, down_share, slots, normalise;
  float limit, temperature, scale;
};

enum { LOGITS, PANELS, EXITS, FLAGS };

struct Shared {  // of a block, behind the rings
  u32 counts[32];  // warps that are done with a slot's sums
  int ids[MOST_CHOSEN];
  float weights[MOST_CHOSEN];
  float partial[MOST_GATES][ROW_THREADS / 32];
  float scores[MOST_EXPERTS];
  u32 keys[MOST_EXPERTS];
  int found[MOST_CHOSEN];
  float rest[64];   // of the last panel of the chosen gate+up: what following blocks add to it
  u8 barriers[32];  // choice made; hidden rows whole; `rest` there
};

__device__ __forceinline__ float score_of(float logit) {
  float x = min(logit, 20.f), grown = power2(1.4426950408889634f * x), one = 1.f + grown;
  float small = one == 1.f ? grown : logf(one) * (grown / (one - 1.f));
  return sqrtf(logit > 20.f ? logit : small);
}

// The chosen experts, ascending, and their weights, by one warp. All loops are rolled: this code runs once, and comes from far.
__device__ __forceinline__ void choose(const Call& c, Shared* own, int lane, bool write) {
  const float* bias = c.text[0] ? c.bias_text : c.bias_image;
  int broken = 0;
#pragma unroll 1
  for (int first = lane; first < c.experts; first += 128) {
    float logit[4], more[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int e = min(first + 32 * i, c.experts - 1);
      logit[i] = __ldcg(c.logits + e), more[i] = __ldg(bias + e);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int e = first + 32 * i;
      if (e < c.experts) own->scores[e] = logit[i], own->keys[e] = __float_as_uint(more[i]);
    }
  }
#pragma unroll 1
  for (int e = lane; e < c.experts; e += 32) {
    float score = score_of(own->scores[e] / c.temperature), order = score + __uint_as_float(own->keys[e]) + 0.f;
    broken |= order != order;
    u32 bits = __float_as_uint(order);
    own->scores[e] = score;
    own->keys[e] = max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
  }
  bool whole = __ballot_sync(0xFFFFFFFF, broken) == 0;
#pragma unroll 1
  for (int turn = 0; turn < c.chosen; turn++) {
    u32 best = 0, at = 0;
#pragma unroll 1
    for (int e = lane; e < c.experts; e += 32)
      if (own->keys[e] > best) best = own->keys[e], at = e;
    u32 highest = warp_max(best);
    at = warp_min(best == highest ? at : 0xFFFFFFFF);
    if (at % 32 == lane) own->keys[at] = 0, own->found[turn] = at;
  }
  __syncwarp();
  int mine = lane < c.chosen ? own->found[lane] : 0, place = 0;
  float sum = 0.f;
  // A row with a NaN weighs nothing.
  float weight = whole ? own->scores[mine] : 0.f;
#pragma unroll 1
  for (int k = 0; k < c.chosen; k++) {
    int other = own->found[k];
    place += other < mine;
    sum += whole ? own->scores[other] : 0.f;
  }
  if (c.normalise) weight = weight / (sum + 1e-20f);
  if (lane < c.chosen) {
    own->ids[place] = mine, own->weights[place] = weight * c.scale;
    if (write) c.ids[place] = whole ? mine : -1, c.weights[place] = weight * c.scale;
  }
  __syncwarp();
}

// A lane's hidden value of a panel, whole: activation, weight, FP8 of the 32 lanes. `expert`: place among the chosen, or `chosen`.
__device__ __forceinline__ void finish(const Call& c, float gate, float up, int expert, int panel, float weight, int lane) {
  gate = min(rounded(gate), c.limit);
  up = rounded(up);
  up = up > c.limit ? c.limit : up < -c.limit ? -c.limit : up;
  float value = rounded(gate / (1.f + power2(-1.4426950408889634f * max(gate, -80.f))) * up * weight);
  float quantised = fake_fp8(value, fp8_scale(warp_max(size_of(value))));
  c.hidden[(i64)expert * c.hidden_width + panel * 32 + lane] = (u16)bfloat_pair(quantised, 0.f);
  __syncwarp();
  if (lane == 0) publish(c.counters + PANELS, 1);
}

__device__ __forceinline__ float2 sum_of_warps(const float* sums, int lane) {
  float2 total = make_float2(0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    float2 own = *(const float2*)(sums + w * 64 + 2 * lane);
    total.x += own.x, total.y += own.y;
  }
  return total;
}

// Adds the parts of a panel that following blocks made.
__device__ __forceinline__ void add_following(float2& total, const float* parts, u32* flags, int block, int share, int stop, int lane) {
#pragma unroll 1
  for (int other = block + 1; other * share < stop; other++) {
    if (lane == 0) {
      while (!seen(flags + other)) {}
      flags[other] = 0;
    }
    __syncwarp();
    float2 own = __ldcg((const float2*)(parts + other * 64 + 2 * lane));
    total.x += own.x, total.y += own.y;
  }
}

struct Run {  // a block's part of a phase
  int first, end, chunks, panel, slots;  // `panel`: the first
  __device__ __forceinline__ void cut(int block, int share, int all, int chunks_of_panel) {
    first = min(block * share, all), end = min(first + share, all), chunks = chunks_of_panel;
    panel = (u32)first / (u32)chunks;
    slots = first < end ? (u32)(end - 1) / (u32)chunks - panel + 1 : 0;
  }
};

struct Work {
  Run shared_up, routed_up, down;
  int fp4_down, fp8_down, up_panels, up_all;  // chunks of a down panel an expert; panels and chunks of an expert's gate+up
};

// What a warp reads next, a chunk of every `WARPS`.
struct Reader {
  Ring<STAGES, STAGE> ring;
  int phase, unit, end, left, expert, panel, place;
  i64 chunk;

  __device__ __forceinline__ void open(u8* rings, const Work& w, int warp) {
    ring.open(rings, warp);
    phase = 0, unit = w.shared_up.first + warp, end = w.shared_up.end;
  }
  // The shared expert's gate+up alone, before the choice is known.
  __device__ __forceinline__ bool fill_shared(const Call& c, int lane) {
    if (unit >= end) return false;
    ring.fill(true, c.shared_up_codes + (i64)unit * CODES, nullptr, lane);
    unit += WARPS;
    return true;
  }
  __device__ __forceinline__ void fill(const Call& c, const Work& w, const Shared* own, int lane) {
    while (unit >= end && phase < 2) {
      int behind = unit - end;
      if (phase++ == 0) {
        wait(shared_address(own->barriers), 0);
        unit = w.routed_up.first + behind, end = w.routed_up.end;
        expert = (u32)unit / (u32)w.up_all, left = (expert + 1) * w.up_all - unit;
        chunk = (i64)own->ids[min(expert, c.chosen - 1)] * w.up_all + (w.up_all - left);
      } else {
        unit = w.down.first + behind, end = w.down.end;
        panel = (u32)unit / (u32)w.down.chunks, place = unit - panel * w.down.chunks;
      }
    }
    bool there = unit < end;
    const u8 *codes = c.shared_up_codes + (i64)unit * CODES, *scales = nullptr;
    if (phase == 1) {
      if (there && left <= 0) {
        while (left <= 0) expert++, left += w.up_all;
        chunk = (i64)own->ids[expert] * w.up_all + (w.up_all - left);
      }
      codes = c.up_codes + chunk * CODES, scales = c.up_scales + chunk * FP4_SCALES;
      chunk += WARPS, left -= WARPS;
    } else if (phase == 2) {
      int fp4 = c.chosen * w.fp4_down;
      if (place < fp4) {
        int e = (u32)place / (u32)w.fp4_down;
        i64 at = ((i64)own->ids[e] * (c.width / 64) + panel) * w.fp4_down + (place - e * w.fp4_down);
        codes = c.down_codes + at * CODES, scales = c.down_scales + at * FP4_SCALES;
      } else codes = c.shared_down_codes + ((i64)panel * w.fp8_down + (place - fp4)) * CODES;
      place += WARPS;
      while (place >= w.down.chunks) place -= w.down.chunks, panel++;
    }
    ring.fill(there, codes, scales, lane);
    unit += WARPS;
  }
};

// Inputs of a chunk of FP4 as right operands: run r of 32 in column 2 r, times 2^64, beside zeros; nobody reads odd columns.
__device__ __forceinline__ void take_runs(uint4 (&in)[4], const u8* x, int lane) {
  int own = lane >> 3;
  uint4 w = shared_words(x + own * 64 + (lane & 3) * 16);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    u32 up = own == r ? 0x5F805F80 : 0;
    in[r] = make_uint4(times(w.x, up), times(w.y, up), times(w.z, up), times(w.w, up));
  }
}
// Codes to bfloat16 pairs, values * 2^-126: a subnormal one is as good as any.
__device__ __forceinline__ void spread_fp4(u32 w, u32 (&out)[4]) {
  out[0] = w & 0x81C081C0u;
  out[1] = (w << 3) & 0x81C081C0u;
  out[2] = (w << 6) & 0x81C081C0u;
  u32 v = __byte_perm(w, 0, 0x2301);  // left shifts only, which several units can do
  out[3] = ((v << 4) & 0x00C000C0u) | ((v << 3) & 0x01000100u) | ((v << 9) & 0x80008000u);
}
// Adds a chunk of FP4: runs are summed beside each other, lane 4 g + r has run r's, so that a scale multiplies 32 products at once.
__device__ __forceinline__ void add_runs(Sums& sums, const u8* stage, const uint4 (&in)[4], int lane) {
  int g = lane >> 2, t = lane & 3;
  const u32* scales = (const u32*)(stage + CODES);
  u32 pick = 0x0444 | t << 12;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    uint4 top[2], low[2];
    float first[2], second[2], d[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = (m + i) * 16 + g;
      top[i] = shared_words(stage + row * 64 + t * 16), low[i] = shared_words(stage + (row + 8) * 64 + t * 16);
      first[i] = __uint_as_float(__byte_perm(scales[row] + 0x3E3E3E3E, 0, pick) >> 1);
      second[i] = __uint_as_float(__byte_perm(scales[row + 8] + 0x3E3E3E3E, 0, pick) >> 1);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 o[2][4][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        spread_fp4(h ? top[i].z : top[i].x, o[i][0]), spread_fp4(h ? low[i].z : low[i].x, o[i][1]);
        spread_fp4(h ? top[i].w : top[i].y, o[i][2]), spread_fp4(h ? low[i].w : low[i].y, o[i][3]);
      }
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          product_16(d[i], o[i][0][r], o[i][1][r], o[i][2][r], o[i][3][r], h ? in[r].z : in[r].x, h ? in[r].w : in[r].y);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) sums[m + i][0] += d[i][0] * first[i], sums[m + i][2] += d[i][2] * second[i];
  }
}
__device__ __forceinline__ void keep_runs(float* to, Sums& sums, int lane) {
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int h = 0; h < 4; h += 2)
#pragma unroll
      for (int by = 1; by < 4; by *= 2) sums[m][h] += __shfl_xor_sync(0xFFFFFFFF, sums[m][h], by);
  keep(to, sums, lane);
}

// Whether this warp is the last of the block to leave its sums in a slot.
__device__ __forceinline__ bool last_of(u32* count, int lane) {
  u32 before = 0;
  __syncwarp();
  if (lane == 0) {
    __threadfence_block();
    before = atomicAdd(count, 1u);
    __threadfence_block();
  }
  return __shfl_sync(0xFFFFFFFF, before, 0) == WARPS - 1;
}

// The inputs of all of a warp's chunks of down, from `first` on, at once.
__device__ __forceinline__ void take_hidden(const Call& c, const Work& w, u8* to, u32 first, int lane) {
  const Run& run = w.down;
  u32 fp4 = c.chosen * w.fp4_down;
#pragma unroll 1
  for (int i = lane; i < (c.down_share + WARPS - 1) / WARPS * 16; i += 32) {
    u32 unit = first + i / 16 * WARPS, place = unit % (u32)run.chunks, piece = i % 16;
    if (unit >= (u32)run.end || (place >= fp4 && piece >= 8)) continue;
    u32 e = place < fp4 ? place / (u32)w.fp4_down : c.chosen;
    u32 d = place < fp4 ? (place - e * w.fp4_down) * 128 : (place - fp4) * 64;
    copy_unit(to + i * 16, c.hidden + (i64)e * c.hidden_width + d + piece * 8, true);
  }
  copies_commit();
  copies_wait<0>();
  __syncwarp();
}

// A panel's sums are whole in this block's warps: what becomes of them. `phase`: shared gate+up, chosen gate+up, down.
__device__ __forceinline__ void leave(const Call& c, const Work& w, const Shared* own, const float* sums, const Run& run, int phase, int panel,
                                      int lane) {
  int block = blockIdx.x;
  float2 whole = sum_of_warps(sums, lane);
  if (phase == 2) {
    int part = block - (u32)(panel * run.chunks) / (u32)c.down_share;
    *(float2*)(c.out + (i64)part * c.width + panel * 64 + 2 * lane) = whole;
    return;
  }
  float* parts = phase ? c.routed_parts : c.shared_parts;
  u32* flags = c.counters + FLAGS + (phase ? c.blocks : 0);
  if (panel * run.chunks < run.first) {
    *(float2*)(parts + block * 64 + 2 * lane) = whole;
    __syncwarp();
    if (lane == 0) publish(flags + block, 1);
    return;
  }
  int stop = (panel + 1) * run.chunks, expert = c.chosen;
  if (phase) {
    expert = (u32)panel / (u32)w.up_panels, panel -= expert * w.up_panels;
    if (stop > run.end) {
      wait(shared_address(own->barriers) + 16, 0);
      float2 rest = *(const float2*)(own->rest + 2 * lane);
      whole.x += rest.x, whole.y += rest.y;
    }
  } else if (stop > run.end) return;  // parts of others come as late as these: the warp that chooses finishes such a panel
  finish(c, whole.x, whole.y, expert, panel, phase ? own->weights[expert] : 1.f, lane);
}

__device__ __forceinline__ void multiply(const Call& c, const Work& w, Reader& reader, Shared* own, float* sums, const u32* up_table, const u32* down_table, u8* x,
                                         int warp, int lane) {
  int behind = warp;  // chunks of the run before the warp's next one
#pragma unroll 1
  for (int phase = 0; phase < 3; phase++) {
    Run run = phase == 0 ? w.shared_up : phase == 1 ? w.routed_up : w.down;
    // Behind this many chunks of a panel come chunks of FP8.
    int fp4 = phase == 0 ? 0 : phase == 1 ? run.chunks : c.chosen * w.fp4_down;
    const u32* table = phase == 0 ? up_table : down_table;
    int base = phase == 1 ? w.shared_up.slots : 0, unit = run.first + behind, panel = run.panel;
    u32* counts = own->counts + (phase == 2 ? 16 : base);
    u8* in = x;
    if (phase == 1) wait(shared_address(own->barriers), 0);
    if (phase == 2) {
      wait(shared_address(own->barriers) + 8, 0);
      in += warp * ((c.down_share + WARPS - 1) / WARPS) * 256;
      take_hidden(c, w, in, unit, lane);
    }
#pragma unroll 1
    for (int slot = 0; slot < run.slots; slot++, panel++) {
      int stop = min(run.end, (panel + 1) * run.chunks);
      Sums total = {};
#pragma unroll 1
      for (; unit < stop; unit += WARPS) {
        const u8* chunk = reader.ring.arrived();
        reader.fill(c, w, own, lane);
        int place = unit - panel * run.chunks;
        if (phase < 2) in = x + place * (phase ? 256 : 128);
        if (place < fp4) {
          uint4 runs[4];
          take_runs(runs, in, lane);
          add_runs(total, chunk, runs, lane);
        } else add_fp8(total, chunk, table[unit - run.first], in, phase == 0, lane);
        if (phase == 2) in += 256;
      }
      float* mine = sums + (base + slot) * WARPS * 64;
      keep_runs(mine + warp * 64, total, lane);
      if (last_of(counts + slot, lane)) leave(c, w, own, mine, run, phase, panel, lane);
    }
    behind = unit - run.end;
  }
}

// A warp beside those that multiply: logits, the choice, the shared expert's panels of several blocks, and word of whole hidden rows.
__device__ __forceinline__ void clerk(const Call& c, const Work& w, Shared* own, const float* sums, int lane) {
  int block = blockIdx.x;
  if (lane == 0) {
    for (int g = 0; g < MOST_GATES && block + g * c.blocks < c.experts; g++) {
      float sum = 0.f;
      for (int i = 0; i < ROW_THREADS / 32; i++) sum += own->partial[g][i];
      c.logits[block + g * c.blocks] = sum;
    }
    publish(c.counters + LOGITS, 1);
    while (seen(c.counters + LOGITS) != (u32)c.blocks) {}
  }
  __syncwarp();
  choose(c, own, lane, block == 0);
  if (lane == 0) arrive(shared_address(own->barriers));
  const Run& run = w.shared_up;
  int slot = run.slots - 1, panel = run.panel + slot, stop = (panel + 1) * run.chunks;
  if (slot >= 0 && panel * run.chunks >= run.first && stop > run.end) {
    if (lane == 0)
      while (seen(own->counts + slot) != WARPS) {}
    __syncwarp();
    float2 whole = sum_of_warps(sums + slot * WARPS * 64, lane);
    add_following(whole, c.shared_parts, c.counters + FLAGS, block, c.shared_share, stop, lane);
    finish(c, whole.x, whole.y, c.chosen, panel, 1.f, lane);
  }
  // Other blocks have long left their part of the last panel of the chosen gate+up when this one comes to its end.
  const Run& chosen = w.routed_up;
  slot = chosen.slots - 1, panel = chosen.panel + slot, stop = (panel + 1) * chosen.chunks;
  if (slot >= 0 && panel * chosen.chunks >= chosen.first && stop > chosen.end) {
    float2 rest = make_float2(0.f, 0.f);
    add_following(rest, c.routed_parts, c.counters + FLAGS + c.blocks, block, c.routed_share, stop, lane);
    *(float2*)(own->rest + 2 * lane) = rest;
    __syncwarp();
    if (lane == 0) arrive(shared_address(own->barriers) + 16);
  }
  if (block == c.blocks - 1) {
    part_sums(c.streams, own->scores, 0, 1, lane);
    __syncwarp();
    coefficients(c.streams, own->scores, 1, lane);
  }
  if (lane == 0) {
    u32 all = (c.chosen + (w.fp8_down > 0)) * w.up_panels;
    while (seen(c.counters + PANELS) != all) {}
    arrive(shared_address(own->barriers) + 8);
    // The last block to come here leaves zeros for the next launch: nobody looks at the counters any more.
    if (atomicAdd(c.counters + EXITS, 1u) == (u32)c.blocks - 1) c.counters[LOGITS] = c.counters[PANELS] = c.counters[EXITS] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_row(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, block = blockIdx.x;
  Work w;
  w.up_panels = c.hidden_width / 32, w.up_all = w.up_panels * (c.width / 128);
  // Without a shared expert its runs are empty.
  bool shared = c.shared_share > 0;
  w.fp4_down = c.hidden_width / 128, w.fp8_down = shared ? c.hidden_width / 64 : 0;
  int down_chunks = c.chosen * w.fp4_down + w.fp8_down;
  w.shared_up.cut(block, c.shared_share, shared ? w.up_panels * (c.width / 64) : 0, c.width / 64);
  w.routed_up.cut(block, c.routed_share, c.chosen * w.up_all, c.width / 128);
  w.down.cut(block, c.down_share, c.width / 64 * down_chunks, down_chunks);

  Shared* own = (Shared*)(raw + WARPS * STAGES * STAGE);
  u8* x = (u8*)(own + 1);
  float* sums = (float*)(x + max(2 * c.width, (c.down_share + WARPS - 1) / WARPS * WARPS * 256));
  u32* up_table = (u32*)(sums + c.slots * WARPS * 64);
  u32* down_table = up_table + c.shared_share;
  Reader reader;
  int ahead = 1;
  if (warp < WARPS) {
    reader.open(raw, w, warp);
    for (; ahead < STAGES && reader.fill_shared(c, lane); ahead++) {}
  } else {
    if (lane < 3) barrier_init(shared_address(own->barriers) + 8 * lane, 1);
    own->counts[lane] = 0;
  }
  let_next();
#pragma unroll 1
  for (int i = thread; i < w.shared_up.end - w.shared_up.first; i += THREADS)
    up_table[i] = __ldg(c.shared_up_scales + w.shared_up.first + i);
#pragma unroll 1
  for (int i = thread; i < w.down.end - w.down.first; i += THREADS) {
    int unit = w.down.first + i, panel = (u32)unit / (u32)down_chunks, place = unit - panel * down_chunks - c.chosen * w.fp4_down;
    if (place >= 0) down_table[i] = __ldg(c.shared_down_scales + panel * w.fp8_down + place);
  }
  if (thread < ROW_THREADS) {
    float4 norm[D_STEPS];
    norm_weights(norm, c.streams, thread);
    uint2 gates[MOST_GATES][D_STEPS];
#pragma unroll
    for (int g = 0; g < MOST_GATES; g++) {
      int e = block + g * c.blocks;
#pragma unroll
      for (int i = 0; i < D_STEPS; i++) {
        int d = 4 * (thread + 256 * i);
        gates[g][i] = e < c.experts && d < c.width ? __ldg((const uint2*)(c.gate + (i64)e * c.width + d)) : make_uint2(0, 0);
      }
    }
    wait_for_launch();
    float one[D_STEPS][4];
    norm_row(one, x, norm, c.streams, thread, block == c.blocks - 1);
#pragma unroll
    for (int g = 0; g < MOST_GATES; g++) {
      float sum = 0.f, weight[4];
#pragma unroll
      for (int i = 0; i < D_STEPS; i++) {
        four_of(gates[g][i], weight);
#pragma unroll
        for (int e = 0; e < 4; e++) sum += one[i][e] * weight[e];
      }
      sum = warp_sum(sum);
      if (lane == 0) own->partial[g][warp] = sum;
    }
  } else wait_for_launch();
  __syncthreads();
  if (warp == WARPS) {
    clerk(c, w, own, sums, lane);
    return;
  }
  for (; ahead < STAGES; ahead++) reader.fill(c, w, own, lane);
  multiply(c, w, reader, own, sums, up_table, down_table, x, warp, lane);
}
