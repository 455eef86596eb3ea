// The experts' half of a layer for one row in one launch, for Hopper (sm_90a): after `device/stream.cuh`,
// `hyper_connections/collapse.cuh` and `routing/choose.cuh`.
//
// Every block norms and quantises the row, then takes equal runs of chunks of three pieces: gate+up of the shared expert, of the chosen
// ones, and all downs. Scores of the router are made by all blocks before the first run, the choice by a warp of each while the first run
// is read. Answers of memory come to a multiprocessor in their order: what is waited for is asked for before the rings are filled.
// Panels that blocks share are finished by the block that begins them, from the others' parts in their order; downs are left as parts for
// the next pass, or added the same way: bits never depend on timing. A row may also come with its experts chosen. All blocks must be on
// the card at once. Knows no layers.

static const int WARPS = 12;  // that multiply
static const int STAGES = 2;
static const int STAGE = CODES + FP4_SCALES;
static const int THREADS = 32 * (WARPS + 1);  // one warp chooses
static const int MOST_EXPERTS = 384;
static const int MOST_CHOSEN = 16;
static const int MOST_GATES = 3;     // rows of the router a block
static const int MOST_WIDTH = 1024 * D_STEPS;
static const int MOST_SLOTS = 32;

enum { SHARED_UP, ROUTED_UP, DOWN, PIECES };

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
  float* parts;         // [2, blocks, 64] of panels that blocks share
  u16* hidden;          // [K + 1, F]
  float* out;           // parts [most, D]
  i64* ids;             // [K]: made, or given beside a row
  float* weights;
  const u16* given;     // [D] a row whose experts are chosen and whose channels are quantised; null: norm and route
  float* whole;         // [D] the parts' sum; null: left in parts
  u64* scores;          // [E] an expert's order and score: zero before and after
  u32* counters;        // panels, exits, then two flags a block: zero before and after
  Streams streams;
  int width, hidden_width, experts, chosen, blocks, shared_share, up_share, down_share, slots, inputs, normalise;
  float limit, temperature, scale;
};

enum { PANELS, EXITS, FLAGS };
// Barriers of a block: choice made; hidden rows whole; `rest` there.
enum { CHOICE, HIDDEN, REST, BARRIERS };

struct Run {  // a block's part of a piece
  int first, end, chunks, panel, slots;  // `chunks` of a panel; `panel`: the first
};

struct __align__(16) Shared {  // of a block, behind the rings
  u64 barriers[BARRIERS];
  float rest[64];          // of the last panel of the chosen gate+up: what following blocks add to it
  float sums[32];
  u32 counts[MOST_SLOTS];  // warps that are done with a slot's sums
  Run runs[PIECES];
  int ids[MOST_CHOSEN];
  float weights[MOST_CHOSEN];
  float partial[MOST_GATES][ROW_THREADS / 32];
};

struct Work {
  int up_panels, up_all, fp4_down, fp8_down;  // panels and chunks of an expert's gate+up; chunks of a down panel: an expert's, the shared one's
  __device__ __forceinline__ Run run(const Call& c, int block, int piece) const {
    Run r;
    int share = piece == SHARED_UP ? c.shared_share : piece == ROUTED_UP ? c.up_share : c.down_share;
    r.chunks = piece == SHARED_UP ? c.width / 64 : piece == ROUTED_UP ? c.width / 128 : c.chosen * fp4_down + fp8_down;
    // Without a shared expert its runs are empty.
    int all = (piece == SHARED_UP ? (fp8_down ? up_panels : 0) : piece == ROUTED_UP ? c.chosen * up_panels : c.width / 64) * r.chunks;
    r.first = min(block * share, all), r.end = min(r.first + share, all);
    r.panel = (u32)r.first / (u32)r.chunks;
    r.slots = r.first < r.end ? (u32)(r.end - 1) / (u32)r.chunks - r.panel + 1 : 0;
    return r;
  }
};

// The choice, for this block and, by one of all, for whoever reads it.
template <int KEYS> __device__ __forceinline__ void take_choice(const Call& c, Shared* own, int lane, bool write) {
  Choice one = choose<KEYS>(c.scores, c.experts, c.chosen, c.normalise, lane);
  if (lane < c.chosen) {
    own->ids[one.place] = one.expert, own->weights[one.place] = one.weight * c.scale;
    if (write) c.ids[one.place] = one.whole ? one.expert : -1, c.weights[one.place] = one.weight * c.scale;
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

// Adds the parts of a panel that following blocks made; it ends `stop` chunks behind the first block's.
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

// Whether all have arrived; the lanes of a warp agree.
__device__ __forceinline__ bool passed(u32 at, int parity) {
  u32 there;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(there)
               : "r"(at), "r"(parity)
               : "memory");
  return __ballot_sync(0xFFFFFFFF, there) == 0xFFFFFFFF;
}

// What a warp reads next, a chunk of every `WARPS`.
struct Reader {
  Ring<STAGES, STAGE> ring;
  int piece, unit, end, left, expert, panel, place;
  int owed;  // chunks that were not asked for, because the choice was not known
  i64 chunk;

  __device__ __forceinline__ void open(u8* rings, const Run& shared_up, int warp) {
    ring.open(rings, warp);
    piece = owed = 0, unit = shared_up.first + warp, end = shared_up.end;
  }
  // The shared expert's gate+up alone, before the choice is known.
  __device__ __forceinline__ bool fill_shared(const Call& c, int lane) {
    if (unit >= end) return false;
    ring.fill(true, c.shared_up_codes + (i64)unit * CODES, nullptr, lane);
    unit += WARPS;
    return true;
  }
  __device__ __forceinline__ void fill(const Call& c, const Work& w, const Shared* own, int lane) {
    while (unit >= end && piece < DOWN) {
      if (piece == SHARED_UP && !passed(shared_address(own->barriers + CHOICE), 0)) {
        copies_commit();
        owed++;
        return;
      }
      const Run& run = own->runs[++piece];
      unit += run.first - end, end = run.end;
      if (unit >= end) continue;
      if (piece == ROUTED_UP) {
        expert = (u32)unit / (u32)w.up_all, left = (expert + 1) * w.up_all - unit;
        chunk = (i64)own->ids[expert] * w.up_all + (w.up_all - left);
      } else panel = (u32)unit / (u32)run.chunks, place = unit - panel * run.chunks;
    }
    if (unit >= end) {
      copies_commit();
      return;
    }
    const u8 *codes, *scales = nullptr;
    if (piece == ROUTED_UP) {
      if (left <= 0) {
        while (left <= 0) expert++, left += w.up_all;
        chunk = (i64)own->ids[expert] * w.up_all + (w.up_all - left);
      }
      codes = c.up_codes + chunk * CODES, scales = c.up_scales + chunk * FP4_SCALES;
      chunk += WARPS, left -= WARPS;
    } else if (piece == DOWN) {
      int fp4 = c.chosen * w.fp4_down;
      if (place < fp4) {
        int e = (u32)place / (u32)w.fp4_down;
        i64 at = ((i64)own->ids[e] * (c.width / 64) + panel) * w.fp4_down + (place - e * w.fp4_down);
        codes = c.down_codes + at * CODES, scales = c.down_scales + at * FP4_SCALES;
      } else codes = c.shared_down_codes + ((i64)panel * w.fp8_down + (place - fp4)) * CODES;
      place += WARPS;
      for (int chunks = fp4 + w.fp8_down; place >= chunks; place -= chunks) panel++;
    } else codes = c.shared_up_codes + (i64)unit * CODES;
    ring.fill(true, codes, scales, lane);
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
  out[3] = (((w >> 8) & 0x006C006Cu) * 1057u) & 0x81C081C0u;  // no terms of the product meet
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
// Keeps a warp's sums of a panel, those of its runs added.
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
__device__ __forceinline__ void take_hidden(const Call& c, const Work& w, const Run& run, u8* to, int first, int lane) {
  int fp4 = c.chosen * w.fp4_down;
#pragma unroll 1
  for (int i = lane; i < c.inputs * 16; i += 32) {
    int unit = first + i / 16 * WARPS, place = (u32)unit % (u32)run.chunks, part = i % 16;
    if (unit >= run.end || (place >= fp4 && part >= 8)) continue;
    int e = place < fp4 ? (u32)place / (u32)w.fp4_down : c.chosen, d = place < fp4 ? (place - e * w.fp4_down) * 128 : (place - fp4) * 64;
    copy_unit(to + i * 16, c.hidden + (i64)e * c.hidden_width + d + part * 8, true);
  }
  copies_commit();
  copies_wait<0>();
  __syncwarp();
}

// A panel's sums are whole in this block's warps: what becomes of them.
__device__ __forceinline__ void leave(const Call& c, const Work& w, const Shared* own, const float* sums, const Run& run, int piece, int panel,
                                      int lane) {
  int block = blockIdx.x;
  float2 whole = sum_of_warps(sums, lane);
  if (piece == DOWN && !c.whole) {
    int part = block - (u32)(panel * run.chunks) / (u32)c.down_share;
    *(float2*)(c.out + (i64)part * c.width + panel * 64 + 2 * lane) = whole;
    return;
  }
  // Parts and flags of the chosen gate+up have been read when downs begin.
  float* parts = c.parts + (piece == SHARED_UP ? 0 : c.blocks * 64);
  u32* flags = c.counters + FLAGS + (piece == SHARED_UP ? 0 : c.blocks);
  if (panel * run.chunks < run.first) {
    *(float2*)(parts + block * 64 + 2 * lane) = whole;
    __syncwarp();
    if (lane == 0) publish(flags + block, 1);
    return;
  }
  int stop = (panel + 1) * run.chunks, expert = c.chosen;
  if (piece == DOWN) {
    if (stop > run.end) add_following(whole, parts, flags, block, c.down_share, stop, lane);
    *(float2*)(c.whole + panel * 64 + 2 * lane) = whole;
    return;
  }
  if (piece == ROUTED_UP) {
    expert = (u32)panel / (u32)w.up_panels, panel -= expert * w.up_panels;
    if (stop > run.end) {
      wait(shared_address(own->barriers + REST), 0);
      float2 rest = *(const float2*)(own->rest + 2 * lane);
      whole.x += rest.x, whole.y += rest.y;
    }
  } else if (stop > run.end) return;  // parts of others come as late as these: the warp that chooses finishes such a panel
  finish(c, whole.x, whole.y, expert, panel, piece == ROUTED_UP ? own->weights[expert] : 1.f, lane);
}

__device__ __forceinline__ void multiply(const Call& c, const Work& w, Reader& reader, Shared* own, float* sums, const u32* up_table,
                                         const u32* down_table, const u8* x, u8* hidden, int warp, int lane) {
  int behind = warp;  // chunks of the run before the warp's next one
  int base = 0;
#pragma unroll 1
  for (int piece = 0; piece < PIECES; piece++) {
    const Run run = own->runs[piece];
    // Behind this many chunks of a panel come chunks of FP8.
    int fp4 = piece == SHARED_UP ? 0 : piece == ROUTED_UP ? run.chunks : c.chosen * w.fp4_down;
    const u32* table = piece == DOWN ? down_table : up_table;
    int unit = run.first + behind, panel = run.panel;
    const u8* in = hidden;
    if (piece == ROUTED_UP) {
      wait(shared_address(own->barriers + CHOICE), 0);
      for (; reader.owed; reader.owed--) reader.fill(c, w, own, lane);
    }
    if (piece == DOWN) {
      wait(shared_address(own->barriers + HIDDEN), 0);
      take_hidden(c, w, run, hidden, unit, lane);
    }
#pragma unroll 1
    for (int slot = base; slot < base + run.slots; slot++, panel++) {
      int stop = min(run.end, (panel + 1) * run.chunks);
      Sums total = {};
#pragma unroll 1
      for (; unit < stop; unit += WARPS) {
        const u8* chunk = reader.ring.arrived();
        reader.fill(c, w, own, lane);
        int place = unit - panel * run.chunks;
        if (piece != DOWN) in = x + place * (piece == ROUTED_UP ? 256 : 128);
        if (place < fp4) {
          uint4 runs[4];
          take_runs(runs, in, lane);
          add_runs(total, chunk, runs, lane);
        } else add_fp8(total, chunk, table[unit - run.first], in, piece == SHARED_UP, lane);
        if (piece == DOWN) in += 256;
      }
      float* mine = sums + slot * WARPS * 64;
      keep_runs(mine + warp * 64, total, lane);
      if (last_of(own->counts + slot, lane)) leave(c, w, own, mine, run, piece, panel, lane);
    }
    base += run.slots;
    behind = unit - run.end;
  }
}

// A warp beside those that multiply: scores, the choice, panels of several blocks, and word of whole hidden rows.
__device__ __forceinline__ void clerk(const Call& c, const Work& w, Shared* own, const float* sums, float bias, int lane) {
  int block = blockIdx.x;
  if (!c.given) {
    if (lane < MOST_GATES && block + lane * c.blocks < c.experts) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < ROW_THREADS / 32; i++) sum += own->partial[lane][i];
      tell_wide(c.scores + block + lane * c.blocks, scored(sum, bias, c.temperature));
    }
    __syncwarp();
    if (c.experts <= 128) take_choice<4>(c, own, lane, block == 0);
    else take_choice<MOST_EXPERTS / 32>(c, own, lane, block == 0);
  }
  if (lane == 0) arrive(shared_address(own->barriers + CHOICE));
  int base = 0;
#pragma unroll 1
  for (int piece = SHARED_UP; piece < DOWN; piece++) {
    // The last panel, if this block begins it and others follow. These have long left their parts of the chosen gate+up when this one
    // comes to its end.
    const Run run = own->runs[piece];
    int panel = run.panel + run.slots - 1, stop = (panel + 1) * run.chunks;
    base += run.slots;
    if (!run.slots || panel * run.chunks < run.first || stop <= run.end) continue;
    float2 whole = make_float2(0.f, 0.f);
    if (piece == SHARED_UP) {
      if (lane == 0)
        while (seen(own->counts + base - 1) != WARPS) {}
      __syncwarp();
      whole = sum_of_warps(sums + (base - 1) * WARPS * 64, lane);
    }
    // Only the last block's share is less.
    add_following(whole, c.parts + piece * c.blocks * 64, c.counters + FLAGS + piece * c.blocks, block, run.end - run.first, stop, lane);
    if (piece == SHARED_UP) finish(c, whole.x, whole.y, c.chosen, panel, 1.f, lane);
    else {
      *(float2*)(own->rest + 2 * lane) = whole;
      __syncwarp();
      if (lane == 0) arrive(shared_address(own->barriers + REST));
    }
  }
  if (block == c.blocks - 1 && !c.given) {
    part_sums(c.streams, own->sums, 0, 1, lane);
    __syncwarp();
    coefficients(c.streams, own->sums, 1, lane);
  }
  u32 before = 0;
  if (lane == 0) {
    u32 all = (c.chosen + (w.fp8_down > 0)) * w.up_panels;
    while (seen(c.counters + PANELS) != all) {}
    arrive(shared_address(own->barriers + HIDDEN));
    before = atomicAdd(c.counters + EXITS, 1u);
  }
  // The last block to come here leaves zeros for the next launch: nobody looks at these any more.
  if (__shfl_sync(0xFFFFFFFF, before, 0) != (u32)c.blocks - 1) return;
  if (lane < FLAGS) c.counters[lane] = 0;
  for (int e = lane; e < c.experts && !c.given; e += 32) c.scores[e] = 0;
}

// A row and its experts as they are given, all asked for at once. One of none weighs nothing.
__device__ __forceinline__ void take_given(const Call& c, Shared* own, u8* x, int thread) {
  const int most = (MOST_WIDTH / 8 + THREADS - 1) / THREADS;
  int units = c.width / 8;
  uint4 row[most];
#pragma unroll
  for (int i = 0; i < most; i++) row[i] = thread + i * THREADS < units ? ((const uint4*)c.given)[thread + i * THREADS] : make_uint4(0, 0, 0, 0);
  i64 id = thread < c.chosen ? c.ids[thread] : 0;
  float weight = thread < c.chosen ? c.weights[thread] : 0.f;
#pragma unroll
  for (int i = 0; i < most; i++)
    if (thread + i * THREADS < units) ((uint4*)x)[thread + i * THREADS] = row[i];
  if (thread < c.chosen) own->ids[thread] = max(id, (i64)0), own->weights[thread] = id < 0 ? 0.f : weight;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_row(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, block = blockIdx.x;
  Work w;
  w.up_panels = c.hidden_width / 32, w.up_all = w.up_panels * (c.width / 128);
  w.fp4_down = c.hidden_width / 128, w.fp8_down = c.shared_share > 0 ? c.hidden_width / 64 : 0;

  Shared* own = (Shared*)(raw + WARPS * STAGES * STAGE);
  u8* x = (u8*)(own + 1);
  u8* hidden = x + 2 * c.width + warp * c.inputs * 256;
  float* sums = (float*)(x + 2 * c.width + WARPS * c.inputs * 256);
  u32* up_table = (u32*)(sums + c.slots * WARPS * 64);
  u32* down_table = up_table + c.shared_share;
  Run shared_up = w.run(c, block, SHARED_UP), down = w.run(c, block, DOWN);
  // What does not depend on the launch before is asked for first, small things before the rings: behind these they would wait for them.
  int ups = shared_up.end - shared_up.first, downs = down.end - down.first;
  u32 up_scale = thread < ups ? __ldg(c.shared_up_scales + shared_up.first + thread) : 0, down_scale = 0;
  if (thread < downs) {
    int panel = (u32)(down.first + thread) / (u32)down.chunks, place = down.first + thread - panel * down.chunks - c.chosen * w.fp4_down;
    if (place >= 0) down_scale = __ldg(c.shared_down_scales + panel * w.fp8_down + place);
  }
  float text = 0.f, image = 0.f;
  float4 norm[D_STEPS];
  uint2 gates[MOST_GATES][D_STEPS];
  bool scores = warp == WARPS && lane < MOST_GATES && !c.given;  // of the router, made by these
  if (scores) {
    int e = min(block + lane * c.blocks, c.experts - 1);
    text = __ldg(c.bias_text + e), image = __ldg(c.bias_image + e);
  } else if (thread < ROW_THREADS && !c.given) {
    norm_weights(norm, c.streams, thread);
#pragma unroll
    for (int g = 0; g < MOST_GATES; g++) {
      int e = block + g * c.blocks;
#pragma unroll
      for (int i = 0; i < D_STEPS; i++) {
        int d = 4 * (thread + 256 * i);
        gates[g][i] = e < c.experts && d < c.width ? __ldg((const uint2*)(c.gate + (i64)e * c.width + d)) : make_uint2(0, 0);
      }
    }
  }
  Reader reader;
  int ahead = 1;
  if (warp < WARPS) {
    reader.open(raw, shared_up, warp);
    for (; ahead < STAGES && reader.fill_shared(c, lane); ahead++) {}
    for (; ahead < STAGES; ahead++) copies_commit(), reader.owed++;
  } else {
    if (lane < BARRIERS) barrier_init(shared_address(own->barriers + lane), 1);
    if (lane < PIECES) own->runs[lane] = w.run(c, block, lane);
    if (lane < MOST_SLOTS) own->counts[lane] = 0;
  }
  let_next();
  if (thread < ups) up_table[thread] = up_scale;
  if (thread < downs) down_table[thread] = down_scale;
  float bias = 0.f;
  if (c.given) {
    wait_for_launch();
    take_given(c, own, x, thread);
  } else if (thread < ROW_THREADS) {
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
  } else {
    wait_for_launch();
    if (scores) bias = c.text[0] ? text : image;
  }
  __syncthreads();
  if (warp == WARPS) {
    clerk(c, w, own, sums, bias, lane);
    return;
  }
  multiply(c, w, reader, own, sums, up_table, down_table, x, hidden, warp, lane);
}
