"""Copies of the sources that mutants.txt names, in which every fault can be chosen when the program runs.

make.py MUTANTS SOURCE_DIR OUT_DIR   writes OUT_DIR/<file> for each, and OUT_DIR/mutant.h and mutant.cpp
make.py MUTANTS --files              prints the files
"""
import pathlib
import re
import sys


def read(path):
    """[(name, file, original, fault, what must see it or "")]"""
    entries = []
    text = "\n".join(line for line in pathlib.Path(path).read_text().splitlines() if not line.startswith("#"))
    for block in re.split(r"\n\s*\n", text.strip()):
        name, *rest = block.strip().splitlines()
        fields = dict(line.split(" ", 1) for line in rest)
        entries.append((name, *(fields.get(key, "").replace("\\n", "\n") for key in ("file", "original", "fault", "by"))))
    names = [entry[0] for entry in entries]
    assert len(set(names)) == len(names), "two mutants have one name"
    return entries


def choice(original, faults):
    """The text that stands for `original`; faults: [(number, fault)]."""
    text = original
    for number, fault in faults:
        chosen = f"mutant({number})"
        if "MUTANT" in fault:
            assert len(faults) == 1, f"another mutant has the original of: {fault}"
            text = fault.replace("MUTANT", chosen)
        elif original.endswith(";"):
            text = f"{{ if ({chosen}) {{ {fault} }} else {{ {text} }} }}"
        else:
            text = f"({chosen} ? ({fault}) : ({text}))"
    return text


def mutated(path, source, faults):
    """faults: {original: [(number, fault)]}"""
    places = []
    for original in faults:
        assert source.count(original) == 1, f"{path} has {source.count(original)} times: {original}"
        places.append((source.index(original), original))
    for (at, original), (following, _) in zip(sorted(places), sorted(places)[1:]):
        assert at + len(original) <= following, f"{path}: mutants overlap at: {original}"
    for at, original in sorted(places, reverse=True):
        source = source[:at] + choice(original, faults[original]) + source[at + len(original):]
    return '#include "mutant.h"\n' + source


def main(mutants, source_dir, out_dir):
    entries = read(mutants)
    out = pathlib.Path(out_dir)
    files = {}
    for number, (_, file, original, fault, _) in enumerate(entries):
        files.setdefault(file, {}).setdefault(original, []).append((number, fault))
    for file, faults in files.items():
        text = mutated(file, (pathlib.Path(source_dir) / file).read_text(), faults)
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text(text)
    (out / "mutant.h").write_text("#pragma once\nnamespace onescale {\nbool mutant(int number);\n}\n")
    names = ",\n".join(f'    "{entry[0]}"' for entry in entries)
    (out / "mutant.cpp").write_text(f"""#include "mutant.h"
#include <cstdlib>
#include <stdexcept>
#include <string>
namespace onescale {{
namespace {{
const char* const names[] = {{
{names}}};
int chosen() {{
  const char* name = std::getenv("ONESCALE_MUTANT");
  if (!name || !*name) return -1;
  for (int i = 0; i < {len(entries)}; ++i) {{
    if (std::string(names[i]) == name) return i;
  }}
  throw std::runtime_error(std::string("no mutant ") + name);
}}
}}  // namespace
bool mutant(int number) {{
  static const int one = chosen();
  return number == one;
}}
}}  // namespace onescale
""")


if __name__ == "__main__":
    if sys.argv[2] == "--files":
        print(";".join(sorted({entry[1] for entry in read(sys.argv[1])})), end="")
    else:
        main(*sys.argv[1:])
