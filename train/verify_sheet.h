// What the tables of `onescale verify` are made of: rows of figures, each with what is right.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "kernels/error.h"
#include "train/verify.h"

namespace onescale {

struct Figure {
  std::string name;
  double value, right, tolerance;
  const char* format = "";  // of the value in the row
};
using Figures = std::vector<Figure>;
using Judge = std::function<Figures(const Measured&)>;

// What a row shows of some steps.
struct Cell {
  std::string text;
  double bad = -1;           // infinite where a figure is off; -1: no step
  std::string layout, path;  // path: stage and reduction
  int sp = 1;
};
// The first of the worst that `which` takes.
inline Cell worst(const std::vector<Cell>& all, const std::function<bool(const Cell&)>& which = {}) {
  Cell worst;
  for (const Cell& cell : all)
    if (cell.bad > worst.bad && (!which || which(cell))) worst = cell;
  return worst;
}

// Every rank makes the same calls; the first one judges and prints.
class Sheet {
 public:
  explicit Sheet(Communicator& world) : world(world) {}

  void title(const std::string& what, const std::string& theirs) {
    if (root()) std::printf("\n%d. %s\n", ++table_, what.c_str());
    line("", "onescale, measured now", theirs);
  }
  void line(const std::string& what, const std::string& ours, const std::string& theirs = "") const {
    if (root()) std::printf("   %-58s %-40s %s\n", what.c_str(), ours.c_str(), theirs.c_str());
  }
  // A row of what is measured in this layout of the first ranks, or that there are too few.
  void row(const std::string& what, const Layout& layout, const std::string& theirs,
           const std::function<std::string()>& ours) {
    const bool lacks = layout.world() > world.size();
    lacking_ += lacks;
    line(what, lacks ? str("needs ", layout.world(), " ranks") : ours(), theirs);
  }
  // A row of the case's steps in all stages, or in the one that its options give: the worst.
  void steps(const std::string& what, const Layout& layout, VerifyCase c, const std::string& theirs,
             const Judge& judge);
  // The same of its gradient, which should be right * the exact one.
  void gradient(const std::string& what, const Layout& layout, const VerifyCase& c, const std::string& theirs = "",
                double right = 1) {
    steps(str(what, ", ", layout.text()), layout, c, theirs, exactly(c, right));
  }
  // Judges a gradient of the case by the exact one, without clipping: ratio of the matrix and of the vector that are
  // worst, and the largest error; N, loss and, last, norm with it.
  Judge exactly(VerifyCase c, double right = 1) const;

  // The case's steps in this layout; an empty cell where there is nothing to judge.
  Cell run(const std::string& what, const Layout& layout, const VerifyCase& c, const Judge& judge);
  // In all layouts, sp_modes, stages and reductions that fit the case, on all ranks or a divisor of them; of what the
  // case's options give, only that. A line says why a layout does not fit.
  std::vector<Cell> everywhere(const std::string& what, VerifyCase c, const Judge& judge);
  Cell figures(const std::string& what, const Figures& all);
  int finish() const;  // prints which figures are off; returns how many
  bool root() const { return world.rank() == 0; }

  Communicator& world;

 private:
  std::vector<std::string> off_;
  int lacking_ = 0, table_ = 0;
};

// Tables, one a reported fault of other trainers: our figure, measured now on small models, beside the faulty one.
// Of the options only device and isa count.
void fault_tables(Sheet& s, const Options& options);

inline constexpr const char* reductions[] = {"ordered", "reduce_scatter", "all_reduce"};

}  // namespace onescale
