#include "tests/parity/cover.h"
#include "tests/parity/jobs.h"
#include "tests/parity/trial.h"

namespace onescale::parity {

namespace {

constexpr std::int64_t rows = 16, seq_len = 16;

struct Degrees {
  int dp, sp, tp;
};
constexpr Degrees degrees[] = {{2, 1, 1}, {1, 2, 1}, {1, 1, 2}, {4, 1, 1}, {1, 4, 1}, {1, 1, 4}, {2, 2, 1},
                               {2, 1, 2}, {1, 2, 2}, {2, 2, 2}, {8, 1, 1}, {1, 8, 1}, {1, 1, 8}, {1, 4, 2},
                               {1, 2, 4}, {4, 2, 1}, {4, 1, 2}, {2, 4, 1}, {2, 1, 4}};
constexpr int ci_degrees = 13;  // the others are products of these

// Which labels are ignored, by row and position.
enum class Labels : std::uint8_t { some, prompts, middle, half_of_rows, every_other_two, uneven, all };
constexpr int label_kinds = 7;

bool ignored(Labels kind, std::int64_t row, std::int64_t position) {
  switch (kind) {
    case Labels::some:
      return philox({static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(position), 0, 1}, seed)[0] % 10 < 3;
    case Labels::prompts:  // nine tenths of a row, so that early shards of a sequence have no good token
      return position < seq_len - seq_len / 8;
    case Labels::middle:  // so that the later zigzag shards have none
      return position >= seq_len / 4 && position < seq_len - seq_len / 4;
    case Labels::half_of_rows:  // so that early data-parallel ranks or micro-batches have none
      return row < rows / 2;
    case Labels::every_other_two:  // so that every rank has micro-batches without
      return row / 2 % 2 == 0;
    case Labels::uneven:
      return row > 0 && (row % 3 != 0 || position != row);
    case Labels::all:
      break;
  }
  return true;
}

HostBatch make_batch(Labels kind, std::int64_t vocab) {
  HostBatch batch{rows, seq_len, {}, {}};
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t t = 0; t <= seq_len; ++t) {
      const auto id = static_cast<std::int32_t>(
          philox({static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(t), 0, 0}, seed)[0] %
          static_cast<std::uint32_t>(vocab));
      if (t < seq_len) batch.ids.push_back(id);
      if (t > 0) batch.labels.push_back(ignored(kind, row, t - 1) ? -100 : id);
    }
  }
  return batch;
}

}  // namespace

void add_grid(Jobs& jobs, bool slow) {
  const double buckets[] = {0, 10, 1000};
  const double clips[] = {0, 1.5, 0.5};
  const std::vector<int> levels = {
      slow ? static_cast<int>(std::size(degrees)) : ci_degrees, 4, 3, 3, 2, 3, label_kinds, 3, 2, 2, 2, 3, 2};
  for (const Combination& c : slow ? grid(levels, 6) : pairwise(levels)) {
    const Degrees& d = degrees[c[0]];
    Path path;
    path.dp = d.dp, path.sp = d.sp, path.tp = d.tp;
    path.stage = c[1];
    path.reduction = static_cast<Reduction>(c[2]);
    path.bucket = buckets[c[3]];
    path.sp_mode = static_cast<SpMode>(c[4]);
    path.micro_batches = std::min<std::int64_t>(1 << c[5], rows / d.dp);
    path.dtype = c[10] == 1 ? DType::bfloat16 : DType::float32;
    path.recompute = static_cast<Recompute>(c[11]);
    const auto labels = static_cast<Labels>(c[6]);
    const double clip = clips[c[7]];
    const bool multi_query = c[8] == 0, tied = c[9] == 0, dropout = c[12] == 1;
    jobs.push_back({path.world(), [=](Communicator& group, Report& report) {
                      report.begin(str(path.text(), " labels=", c[6], " clip=", clip, multi_query ? " mqa" : " mha",
                                       tied ? " tied" : " untied", dropout ? " dropout" : ""));
                      const Model model = small_model(multi_query, tied, dropout);
                      compare_step(group, report, model, make_batch(labels, model.config.vocab_size), path, clip);
                    }});
  }
}

}  // namespace onescale::parity
