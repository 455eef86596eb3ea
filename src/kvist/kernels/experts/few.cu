// A few rows (2 to 8) through the FP4 experts chosen for them, and a shared one of FP8, in one launch, for Hopper (sm_90a): needs
// `device/stream.cuh`.
//
// The shared expert, then the experts that any row chose, ascending, are entries; a unit is a panel of an entry's gate+up, or of its
// downs. Teams of warps claim units as they come, all gate+ups first, and read the chunks of theirs in turn: each weight once. Warps beside
// them make of a unit's sums what becomes of them, so that no warp that multiplies waits for memory but in its ring.
// A unit's sums are always cut the same way, whoever takes it and whoever shares the launch: a row's bits depend on nothing but
// the row. Downs of an entry wait for its own hidden rows only. The last of a row's choices to arrive in a panel adds them in their order.
// Of an entry of one or two rows each run of 32 inputs is summed in a column of its own, of more rows each row in a column: with the
// same bits. All blocks must be on the card at once. Knows no layers.

static const int WARPS = 12;  // that multiply
static const int TEAM = 4;    // of which so many share a unit's chunks
static const int TEAMS = WARPS / TEAM;
static const int NEAR = 2;    // chunks of a warp before a unit's end
static const int STAGES = 2;
static const int STAGE = CODES + FP4_SCALES;
// Beside: one that finishes a team's units each, and one that claims units and tells which hidden rows are whole.
static const int THREADS = 32 * (WARPS + TEAMS + 1);
static const int MOST_ROWS = 8;
static const int MOST_CHOICES = 144;  // of all rows, the shared expert among them
static const int MOST_WORDS = 32;     // of 32 experts
static const int SLOTS = 4;           // of a team, for sums of units of one or two rows; one more for any
// Units that a team knows of, at most: a warp leaves `SLOTS` behind that others have not left, and asks for chunks `TEAM` ahead, one
// in every second unit where these are shortest.
static const int CLAIMED = 32;
static_assert(CLAIMED > SLOTS + 2 * TEAM + 3, "no word of a unit is written again while somebody may read it");
static const int ROW_SUMS = TEAM * 64;  // of a unit and row, floats

struct Call {
  const u16* rows;       // [N, D] FP8-quantised
  const i64* ids;        // [N * K] experts, -1 for none
  const float* weights;  // [N * K]
  const u8* up_codes;    // paired FP4 panels of all experts
  const u8* up_scales;
  const u8* down_codes;
  const u8* down_scales;
  const u8* shared_up_codes;  // FP8, or null
  const u32* shared_up_scales;
  const u8* shared_down_codes;
  const u32* shared_down_scales;
  u16* hidden;    // [N * S, F]: S is K, and one for a shared expert
  u16* each;      // [N * S, D] a choice's output
  void* out;      // [N, D] float; with a shared expert bfloat16
  u32* counters;  // exits, claims, an entry's panels, a row's panels' choices: zero before and after
  int width, hidden_width, count, chosen;
  float limit;
};

enum { EXITS, CLAIMS, READY };

struct Team {
  u32 counts[SLOTS + 1];  // times that a warp has left its sums in a slot
  u32 turns[SLOTS + 1];   // units that were done in a slot
  u32 wanted;             // units that somebody wants to know, or soon will
  u32 claimed;            // units that are known
  u32 units[CLAIMED];     // the last ones of them
};
struct __align__(16) Shared {  // of a block, behind the rings
  Team teams[TEAMS];
  u32 chosen[MOST_WORDS];      // which experts are
  u32 rows[MOST_CHOICES];      // an entry's, a bit each
  u32 whole;                   // entries whose hidden rows are
  int entries;
  int expert[MOST_CHOICES];
  u32 there[MOST_ROWS];        // a row's choices, a bit each
  float weights[MOST_CHOICES];
  unsigned short choice[MOST_CHOICES][MOST_ROWS];  // an entry's choices, and 256 times their rows
};

// Seen without more; in shared memory with what was written before it was told.
__device__ __forceinline__ u32 glimpse(const u32* p) {
  u32 value;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ u32 seen_here(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(p)) : "memory");
  return value;
}
__device__ __forceinline__ void tell_here(u32* p, u32 x) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(x) : "memory");
}

struct Work {
  int entries, up_panels, down_panels, ups, units, choices;  // choices: of a row
  bool shared;
};
static const u32 NONE = 0xFFFFFFFF;
// A unit as a word: its entry, its panel, and whether it is of gate+up.
__device__ __forceinline__ u32 unit_word(const Work& w, u32 index) {
  if (index >= w.units) return NONE;
  u32 up = index < w.ups, place = up ? index : index - w.ups, panels = up ? w.up_panels : w.down_panels, entry = place / panels;
  return entry << 16 | (place - entry * panels) << 1 | up;
}
// The n-th unit of a team.
struct Unit {
  u32 turn;
  int entry, panel, chunks, rows;
  bool up, fp8, there;
  __device__ __forceinline__ void find(const Call& c, const Work& w, const Shared* own, Team* team, int lane) {
    if (seen_here(&team->claimed) <= turn) {
      if (lane == 0) atomicMax(&team->wanted, turn + 1);
      while (seen_here(&team->claimed) <= turn) {}
    }
    take(c, w, own, team->units[turn % CLAIMED]);
  }
  __device__ __forceinline__ void take(const Call& c, const Work& w, const Shared* own, u32 word) {
    there = word != NONE;
    if (!there) return;
    up = word & 1, panel = word >> 1 & 0x7FFF, entry = word >> 16, fp8 = w.shared && entry == 0;
    rows = __popc(own->rows[entry]), chunks = (up ? c.width : c.hidden_width) >> (fp8 ? 6 : 7);
  }
};

// What a warp reads next: a chunk of every `TEAM` of its team's units.
struct Reader {
  Ring<STAGES, STAGE> ring;
  Unit unit;
  int place;
  const u8 *codes, *scales, *from;  // of the unit, and a lane's part of its inputs
  bool late;                        // whether the inputs of a chunk were not there when it was asked for
  u32 scale;                        // of a chunk of FP8
  uint4 in[4];

  __device__ __forceinline__ void open(const Call& c, const Work& w, const Shared* own) {
    int panels = unit.up ? w.up_panels : w.down_panels;
    if (unit.fp8) {
      i64 first = (i64)unit.panel * unit.chunks;
      codes = (unit.up ? c.shared_up_codes : c.shared_down_codes) + first * CODES;
      scales = (const u8*)((unit.up ? c.shared_up_scales : c.shared_down_scales) + first);
    } else {
      i64 first = ((i64)own->expert[unit.entry] * panels + unit.panel) * unit.chunks;
      codes = (unit.up ? c.up_codes : c.down_codes) + first * CODES;
      scales = (unit.up ? c.up_scales : c.down_scales) + first * FP4_SCALES;
    }
  }
  // Columns are rows, or of one or two rows a row's runs of 32 inputs.
  __device__ __forceinline__ void aim(const Call& c, const Shared* own, int lane) {
    bool runs = !unit.fp8 && unit.rows <= 2;
    u32 choice = own->choice[unit.entry][min(runs ? lane >> 2 & 1 : lane >> 2, unit.rows - 1)];
    from = (unit.up ? (const u8*)c.rows + (choice >> 8) * 2 * (i64)c.width : (const u8*)c.hidden + (choice & 255) * 2 * (i64)c.hidden_width) +
           (lane & 3) * 16 + (runs ? (lane >> 3) * 64 : 0);
  }
  __device__ __forceinline__ void take() {
    const uint4* at = (const uint4*)(from + place * (unit.fp8 ? 128 : 256));
    in[0] = __ldcg(at);
    if (unit.rows > 2 || unit.fp8) in[1] = __ldcg(at + 4);
    if (unit.rows > 2 && !unit.fp8) in[2] = __ldcg(at + 8), in[3] = __ldcg(at + 12);
  }
  __device__ __forceinline__ void fill(int lane) {
    ring.fill(unit.there, codes + (i64)place * CODES, unit.fp8 ? nullptr : scales + (i64)place * FP4_SCALES, lane);
    if (unit.there && unit.fp8) scale = __ldg((const u32*)scales + place);
  }
  __device__ __forceinline__ void take_early(const Shared* own) {
    if (!unit.there) return;
    late = !unit.up && __ballot_sync(0xFFFFFFFF, seen_here(&own->whole) <= unit.entry);  // the lanes agree
    if (!late) take();
  }
  __device__ __forceinline__ void take_late(const Shared* own) {
    if (!late) return;
    while (seen_here(&own->whole) <= unit.entry) {}
    __syncwarp();
    take();
  }
  // The next unit is claimed when this one nears its end: whoever claims long before does what others have waited for.
  __device__ __forceinline__ void skip(const Call& c, const Work& w, const Shared* own, Team* team, int lane) {
    if (unit.there && place + NEAR * TEAM >= unit.chunks && lane == 0) atomicMax(&team->wanted, unit.turn + 2);
    if (!unit.there || place < unit.chunks) return;
    do {
      place -= unit.chunks, unit.turn++;
      unit.find(c, w, own, team, lane);
    } while (unit.there && place >= unit.chunks);
    if (unit.there) open(c, w, own), aim(c, own, lane);
  }
};

// Run R's codes of two words as bfloat16 pairs, values * 2^-126: a subnormal one is as good as any.
template <int R> __device__ __forceinline__ u32 spread_run(u32 w) {
  if (R == 0) return w & 0x81C081C0u;
  if (R == 1) return (w << 3) & 0x81C081C0u;
  if (R == 2) return (w << 6) & 0x81C081C0u;
  return (((w >> 8) & 0x006C006Cu) * 1057u) & 0x81C081C0u;  // no terms of the product meet
}
template <int R> __device__ __forceinline__ float scale_of(u32 exponents) {
  return __uint_as_float(__byte_perm(exponents, 0, 0x0444 | R << 12) >> 1);
}

// Adds a chunk to the sums of one or two rows: column 2 r of the right operand has the first row's run r, 2 r + 1 the second's, beside
// zeros; lane 4 g + r has run r's sums, so that a scale multiplies 32 products of both at once.
__device__ __forceinline__ void add_runs(Sums& sums, const u8* stage, uint4 w, int lane) {
  int g = lane >> 2, t = lane & 3, own = lane >> 3;
  const u32* scales = (const u32*)(stage + CODES);
  u32 pick = 0x0444 | t << 12;
  uint4 in[4];
#pragma unroll
  for (int r = 0; r < 4; r++) {
    u32 up = own == r ? 0x5F805F80 : 0;
    in[r] = make_uint4(times(w.x, up), times(w.y, up), times(w.z, up), times(w.w, up));
  }
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
        u32 words[4] = {h ? top[i].z : top[i].x, h ? low[i].z : low[i].x, h ? top[i].w : top[i].y, h ? low[i].w : low[i].y};
#pragma unroll
        for (int q = 0; q < 4; q++)
          o[i][0][q] = spread_run<0>(words[q]), o[i][1][q] = spread_run<1>(words[q]), o[i][2][q] = spread_run<2>(words[q]),
          o[i][3][q] = spread_run<3>(words[q]);
      }
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          product_16(d[i], o[i][r][0], o[i][r][1], o[i][r][2], o[i][r][3], h ? in[r].z : in[r].x, h ? in[r].w : in[r].y);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sums[m + i][0] += d[i][0] * first[i], sums[m + i][1] += d[i][1] * first[i];
      sums[m + i][2] += d[i][2] * second[i], sums[m + i][3] += d[i][3] * second[i];
    }
  }
}
// Keeps a warp's sums of a unit, those of its runs added, ((0 + 1) + (2 + 3)): lanes of a quad exchange half of theirs, then a quarter.
// E: 0 for the first row, 1 for the second.
template <int E> __device__ __forceinline__ void keep_runs(float* to, const Sums& sums, int lane) {
  int t = lane & 3, g = lane >> 2;
  float half[4], own[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float low = sums[i / 2][2 * (i & 1) + E], high = sums[2 + i / 2][2 * (i & 1) + E];
    half[i] = (t & 1 ? high : low) + __shfl_xor_sync(0xFFFFFFFF, t & 1 ? low : high, 1);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) own[i] = (t & 2 ? half[2 + i] : half[i]) + __shfl_xor_sync(0xFFFFFFFF, t & 2 ? half[i] : half[2 + i], 2);
  int at = ((t & 1) * 2 + (t >> 1)) * 16 + g;
  to[at] = own[0], to[at + 8] = own[1];
}

// A run's products of two tiles of outputs with up to eight rows.
template <int R>
__device__ __forceinline__ void add_run(Sums& sums, const uint4& top, const uint4& low, u32 first, u32 second, const uint4& in, int m) {
  float d[4] = {};
  product_16(d, spread_run<R>(top.x), spread_run<R>(low.x), spread_run<R>(top.y), spread_run<R>(low.y), in.x, in.y);
  product_16(d, spread_run<R>(top.z), spread_run<R>(low.z), spread_run<R>(top.w), spread_run<R>(low.w), in.z, in.w);
  float a = scale_of<R>(first), b = scale_of<R>(second);
  sums[m][0] += d[0] * a, sums[m][1] += d[1] * a, sums[m][2] += d[2] * b, sums[m][3] += d[3] * b;
}
// The same for more rows, a column each; a run's sums stay apart, for the bits of the other way.
__device__ __forceinline__ void add_rows(Sums (&sums)[4], const u8* stage, uint4 (&in)[4], int lane) {
  int g = lane >> 2, t = lane & 3;
  const u32* scales = (const u32*)(stage + CODES);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const u32 up = 0x5F805F80;
    in[r] = make_uint4(times(in[r].x, up), times(in[r].y, up), times(in[r].z, up), times(in[r].w, up));
  }
#pragma unroll
  for (int m = 0; m < 4; m++) {
    int row = m * 16 + g;
    uint4 top = shared_words(stage + row * 64 + t * 16), low = shared_words(stage + (row + 8) * 64 + t * 16);
    u32 first = scales[row] + 0x3E3E3E3E, second = scales[row + 8] + 0x3E3E3E3E;
    add_run<0>(sums[0], top, low, first, second, in[0], m), add_run<1>(sums[1], top, low, first, second, in[1], m);
    add_run<2>(sums[2], top, low, first, second, in[2], m), add_run<3>(sums[3], top, low, first, second, in[3], m);
  }
}
// A chunk of FP8 (64 inputs), a column a row. `pairs`: its four exponents, of gates and ups (`paired`) or of outputs by 32.
__device__ __forceinline__ void add_wide(Sums& sums, const u8* stage, u32 pairs, bool paired, const uint4 (&in)[4], int lane) {
  int g = lane >> 2, t = lane & 3;
  u32 both = pairs + 0x78787878;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    u32 own = both >> ((paired ? g & 1 : m / 2) * 16), f[2] = {factor_of(own, 0), factor_of(own, 1)};
    int row = m * 16 + g;
    uint4 top = shared_words(stage + row * 64 + t * 16), low = shared_words(stage + (row + 8) * 64 + t * 16);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 o[4][2];
      expand_fp8(h ? top.z : top.x, f, o[0]), expand_fp8(h ? low.z : low.x, f, o[1]);
      expand_fp8(h ? top.w : top.y, f, o[2]), expand_fp8(h ? low.w : low.y, f, o[3]);
#pragma unroll
      for (int r = 0; r < 2; r++)
        product_16(sums[m], o[0][r], o[1][r], o[2][r], o[3][r], h ? in[r].z : in[r].x, h ? in[r].w : in[r].y);
    }
  }
}
// Keeps a warp's sums of a unit whose columns are rows.
template <int RUNS> __device__ __forceinline__ void keep_rows(float* to, const Sums (&sums)[RUNS], int rows, int lane) {
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int column = (lane & 3) * 2 + (e & 1), at = m * 16 + (lane >> 2) + (e >> 1) * 8;
      float sum = sums[0][m][e];
      if (RUNS == 4) sum = (sum + sums[1][m][e]) + (sums[RUNS - 2][m][e] + sums[RUNS - 1][m][e]);
      if (column < rows) to[column * ROW_SUMS + at] = sum;
    }
}

// Two outputs a lane, whole: activation, weight, FP8 of the 32 lanes' hidden values.
__device__ __forceinline__ void leave_hidden(const Call& c, float gate, float up, float weight, u16* to) {
  gate = min(rounded(gate), c.limit);
  up = rounded(up);
  up = up > c.limit ? c.limit : up < -c.limit ? -c.limit : up;
  float value = rounded(gate / (1.f + power2(-1.4426950408889634f * max(gate, -80.f))) * up * weight);
  *to = (u16)bfloat_pair(fake_fp8(value, fp8_scale(warp_max(size_of(value)))), 0.f);
}
// The choices of a row, whole in a panel, added.
__device__ __forceinline__ void add_choices(const Call& c, const Work& w, const Shared* own, int row, int panel, int lane) {
  float2 total = make_float2(0.f, 0.f);
  u32 there = own->there[row];
  const u32* each = (const u32*)(c.each + ((i64)row * w.choices * c.width + panel * 64)) + lane;
#pragma unroll 1
  for (int first = 0; first < w.choices; first += 8) {
    u32 pairs[8];
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = there >> (first + i) & 1 ? __ldcg(each + (i64)(first + i) * (c.width / 2)) : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) total.x += low_of(pairs[i]), total.y += high_of(pairs[i]);
  }
  i64 at = (i64)row * c.width + panel * 64 + 2 * lane;
  if (w.shared) *(u32*)((u16*)c.out + at) = bfloat_pair(total.x, total.y);
  else *(float2*)((float*)c.out + at) = total;
}

__device__ __forceinline__ float2 sum_of_parts(const float* sums, int r, int lane) {
  float2 whole = make_float2(0.f, 0.f);
#pragma unroll
  for (int j = 0; j < TEAM; j++) {
    float2 part = *(const float2*)(sums + r * ROW_SUMS + j * 64 + 2 * lane);
    whole.x += part.x, whole.y += part.y;
  }
  return whole;
}
// A unit's sums are whole: what becomes of them.
__device__ __forceinline__ void leave_up(const Call& c, const Shared* own, const float* sums, const Unit& unit, int lane) {
#pragma unroll 1
  for (int r = 0; r < unit.rows; r++) {
    int choice = own->choice[unit.entry][r] & 255;
    float2 whole = sum_of_parts(sums, r, lane);
    leave_hidden(c, whole.x, whole.y, own->weights[choice], c.hidden + (i64)choice * c.hidden_width + unit.panel * 32 + lane);
  }
  __syncwarp();
  if (lane == 0) publish(c.counters + READY + unit.entry, 1);
}
// Bfloat16 rounds a choice's output as the release does.
__device__ __forceinline__ void leave_down(const Call& c, const Work& w, const Shared* own, const float* sums, const Unit& unit, int lane) {
#pragma unroll 1
  for (int r = 0; r < unit.rows; r++) {
    float2 whole = sum_of_parts(sums, r, lane);
    *(u32*)(c.each + (i64)(own->choice[unit.entry][r] & 255) * c.width + unit.panel * 64 + 2 * lane) = bfloat_pair(whole.x, whole.y);
  }
  __syncwarp();
  u32 last = 0;
  int row = 0;
  if (lane < unit.rows) {
    row = own->choice[unit.entry][lane] >> 8;
    u32* arrived = c.counters + READY + MOST_CHOICES + row * w.down_panels + unit.panel;
    __threadfence();
    last = atomicAdd(arrived, 1u) == __popc(own->there[row]) - 1;
    __threadfence();
    if (last) *arrived = 0;
  }
  last = __ballot_sync(0xFFFFFFFF, last);
  for (int r = 0; r < unit.rows; r++) {
    int whose = __shfl_sync(0xFFFFFFFF, row, r);
    if (last >> r & 1) add_choices(c, w, own, whose, unit.panel, lane);
  }
}

// Where the sums of a team's units go, in turn.
struct Slot {
  int next;
  u32 used, wide;  // how often the slot was, and the one for any rows
  __device__ __forceinline__ int at(bool few) const { return few ? next : SLOTS; }
  __device__ __forceinline__ u32 turn(bool few) const { return few ? used : wide; }
  __device__ __forceinline__ void step(bool few) {
    if (!few) wide++;
    else if (++next == SLOTS) next = 0, used++;
  }
};

enum { RUNS, ROWS, WIDE };  // columns are runs of one or two rows, or rows of FP4, or of FP8

// A warp's chunks of a unit. `part`: of `TEAM` parts of its chunks; one behind the last has none.
template <int WAY>
__device__ __forceinline__ void add_unit(const Call& c, const Work& w, Reader& reader, const Unit& unit, const Shared* own,
                                         Team* team, float* room, const u32* turns, u32 turn, int part, int lane) {
  const int all = WAY == ROWS ? 4 : 1;
  Sums total[all] = {};
#pragma unroll 1
  for (int place = part; place < unit.chunks; place += TEAM) {
    const u8* chunk = reader.ring.arrived();
    reader.take_late(own);
    uint4 in[4] = {reader.in[0], reader.in[1], reader.in[2], reader.in[3]};
    u32 scale = reader.scale;
    reader.place += TEAM;
    reader.skip(c, w, own, team, lane);
    reader.take_early(own);
    reader.fill(lane);
    if constexpr (WAY == RUNS) add_runs(total[0], chunk, in[0], lane);
    else if constexpr (WAY == ROWS) add_rows(total, chunk, in, lane);
    else add_wide(total[0], chunk, scale, unit.up, in, lane);
  }
  while (seen_here(turns) != turn) {}
  __syncwarp();
  if constexpr (WAY == RUNS) {
    keep_runs<0>(room + part * 64, total[0], lane);
    if (unit.rows > 1) keep_runs<1>(room + ROW_SUMS + part * 64, total[0], lane);
  } else keep_rows<all>(room + part * 64, total, unit.rows, lane);
}

__device__ __forceinline__ void multiply(const Call& c, const Work& w, Reader& reader, Shared* own, Team* team, float* sums, int part,
                                         int lane) {
  Slot slot = {};
  Unit unit;
#pragma unroll 1
  for (unit.turn = 0;; unit.turn++) {
    unit.find(c, w, own, team, lane);
    if (!unit.there) return;
    bool few = unit.rows <= 2;
    int at = slot.at(few);
    float* room = sums + at * 2 * ROW_SUMS;
    u32 *turns = team->turns + at, turn = slot.turn(few);
    if (unit.fp8) add_unit<WIDE>(c, w, reader, unit, own, team, room, turns, turn, part, lane);
    else if (few) add_unit<RUNS>(c, w, reader, unit, own, team, room, turns, turn, part, lane);
    else add_unit<ROWS>(c, w, reader, unit, own, team, room, turns, turn, part, lane);
    __syncwarp();
    if (lane == 0) __threadfence_block(), atomicAdd(team->counts + at, 1u);
    for (part -= unit.chunks; part < 0; part += TEAM) {}
    slot.step(few);
  }
}

// A warp beside a team: what becomes of its units, in their turn.
__device__ __forceinline__ void finish(const Call& c, const Work& w, const Shared* own, Team* team, const float* sums, int lane) {
  Slot slot = {};
  Unit unit;
#pragma unroll 1
  for (unit.turn = 0;; unit.turn++) {
    while (seen_here(&team->claimed) <= unit.turn) __nanosleep(40);
    unit.take(c, w, own, team->units[unit.turn % CLAIMED]);
    if (!unit.there) return;
    bool few = unit.rows <= 2;
    int at = slot.at(few);
    const float* room = sums + at * 2 * ROW_SUMS;
    u32 turn = slot.turn(few) + 1;
    while (seen_here(team->counts + at) != TEAM * turn) __nanosleep(40);
    __syncwarp();
    if (unit.up) leave_up(c, own, room, unit, lane);
    else leave_down(c, w, own, room, unit, lane);
    __syncwarp();
    if (lane == 0) tell_here(team->turns + at, turn);
    slot.step(few);
  }
}

// A warp beside those that multiply: claims, rows without a choice, word of whole hidden rows, zeros for the next launch.
__device__ __forceinline__ void clerk(const Call& c, const Work& w, Shared* own, int lane) {
  for (int row = 0; row < c.count; row++)
    for (int panel = blockIdx.x; !own->there[row] && panel < w.down_panels; panel += gridDim.x)
      *(float2*)((float*)c.out + (i64)row * c.width + panel * 64 + 2 * lane) = make_float2(0.f, 0.f);
  u32 before = 0;
  if (lane == 0) {
    int whole = 0;
    u32 claimed[TEAMS], last[TEAMS], more = 0;
#pragma unroll
    for (int t = 0; t < TEAMS; t++) {
      last[t] = t * gridDim.x + blockIdx.x, claimed[t] = 1, more |= last[t] < w.units;
      own->teams[t].units[0] = unit_word(w, last[t]);
      tell_here(&own->teams[t].claimed, 1);
    }
#pragma unroll 1
    while (whole < w.entries || more) {
      more = 0;
#pragma unroll
      for (int t = 0; t < TEAMS; t++) {
        Team* team = own->teams + t;
        if (last[t] < w.units && claimed[t] < seen_here(&team->wanted)) {
          last[t] = TEAMS * gridDim.x + atomicAdd(c.counters + CLAIMS, 1u);
          team->units[claimed[t] % CLAIMED] = unit_word(w, last[t]);
          tell_here(&team->claimed, ++claimed[t]);
        }
        more |= last[t] < w.units;
      }
      if (whole < w.entries && glimpse(c.counters + READY + whole) == w.up_panels) {
        __threadfence();
        tell_here(&own->whole, ++whole);
      }
    }
    before = atomicAdd(c.counters + EXITS, 1u);
  }
  // The last block to come here: nobody looks at these any more.
  if (__shfl_sync(0xFFFFFFFF, before, 0) != gridDim.x - 1) return;
  for (int e = lane; e < w.entries + READY; e += 32) c.counters[e] = 0;
}

// Entries, ascending, and their choices in the order of rows.
__device__ __forceinline__ void plan(const Call& c, const Work& w, Shared* own, int thread) {
  int id = -1, entry = w.shared, row = (u32)thread / (u32)c.chosen, slot = thread - row * c.chosen, choice = row * w.choices + slot;
  if (row < c.count) {
    id = (int)c.ids[thread], own->weights[choice] = c.weights[thread];
    if (id >= 0) atomicOr(own->chosen + (id >> 5), 1u << (id & 31)), atomicOr(own->there + row, 1u << slot);
  }
  if (w.shared && thread < c.count) {
    choice = thread * w.choices + c.chosen;
    atomicOr(own->there + thread, 1u << c.chosen), atomicOr(own->rows, 1u << thread);
    own->choice[0][thread] = thread << 8 | choice, own->weights[choice] = 1.f;
    choice = row * w.choices + slot;
  }
  __syncthreads();
  if (id >= 0) {
    for (int word = 0; word < id >> 5; word++) entry += __popc(own->chosen[word]);
    entry += __popc(own->chosen[id >> 5] & ((1u << (id & 31)) - 1));
    own->expert[entry] = id;
    atomicOr(own->rows + entry, 1u << row);
  }
  if (thread == THREADS - 1) {
    int all = w.shared;
    for (int word = 0; word < MOST_WORDS; word++) all += __popc(own->chosen[word]);
    own->entries = all;
  }
  __syncthreads();
  if (id >= 0) {
    u32 rows = own->rows[entry];
    own->choice[entry][__popc(rows & ((1u << row) - 1))] = row << 8 | choice;
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_few(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  Shared* own = (Shared*)(raw + WARPS * STAGES * STAGE);
  float* sums = (float*)(own + 1);
  for (int i = thread; i < (int)sizeof(Shared) / 4; i += THREADS) ((u32*)own)[i] = 0;
  Work w;
  w.shared = c.shared_up_codes != nullptr, w.choices = c.chosen + w.shared;
  w.up_panels = c.hidden_width / 32, w.down_panels = c.width / 64, w.ups = w.units = w.shared ? w.up_panels : 0;
  int part = warp % TEAM, number = warp / TEAM;
  Team* team = own->teams + number;
  Reader reader;
  reader.ring.open(raw, warp);
  reader.place = part, reader.late = false;
  reader.unit.take(c, w, own, unit_word(w, number * gridDim.x + blockIdx.x));
  // Weights of the shared expert depend on no launch before.
  bool early = warp < WARPS && reader.unit.there && part < reader.unit.chunks;
  if (early) reader.open(c, w, own), reader.fill(lane);
  let_next();
  wait_for_launch();
  __syncthreads();
  plan(c, w, own, thread);
  w.entries = own->entries, w.ups = w.entries * w.up_panels, w.units = w.ups + w.entries * w.down_panels;
  float* room = sums + (warp < WARPS ? number : warp - WARPS) * (2 * SLOTS + MOST_ROWS) * ROW_SUMS;
  // Of a multiprocessor's registers, 128 a thread, those that multiply get more and the others less.
  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp < WARPS + TEAMS) finish(c, w, own, own->teams + warp - WARPS, room, lane);
    else clerk(c, w, own, lane);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
  reader.unit.turn = 0;
  reader.unit.find(c, w, own, team, lane);
  if (reader.unit.there) {
    if (!early) reader.open(c, w, own);
    reader.aim(c, own, lane);
    reader.skip(c, w, own, team, lane);
  }
  if (!early) reader.fill(lane);
  reader.take_early(own);
  multiply(c, w, reader, own, team, room, part, lane);
}
