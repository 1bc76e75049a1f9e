"""Chooses the faults one by one in the programs that hold them all; each must be seen by what its entry names.

run.py MUTANTS MPIRUN PROGRAMS_DIR [--only NAME]... [--quick]

by FOLDER FILTER   the unit tests of that folder
by parity [GROUP]  the parity suite, or that group of it, on 8 ranks
by verify RANKS    `onescale verify`
without            both parity and verify, on 4 ranks
--quick: those with an entry of their own, and of the others those that --only names, by parity alone.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import make  # noqa: E402


def run(command, mutant, limit=300):
    """(exit code, the first line that says why)"""
    env = {**os.environ, "ONESCALE_MUTANT": mutant, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=limit)
    except subprocess.TimeoutExpired:
        return 124, "no end"
    if "no mutant " in done.stdout + done.stderr:
        sys.exit(f"{command[-1]} does not hold {mutant}: build it")
    said = [line for line in (done.stdout + done.stderr).splitlines()
            if line.startswith(("onescale:", "verify:", "DIFFERS", "[  FAILED", "   "))]
    return done.returncode, said[-1 if "verify" in command else 0].strip() if said else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mutants")
    parser.add_argument("mpirun")
    parser.add_argument("programs", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()

    def command(by):
        what, *words = by.split(" ")
        ranks = 8 if what == "parity" else int(words[0]) if what == "verify" else 1
        mpirun = [*given.mpirun.split(" "), "-n", str(ranks)] if ranks > 1 else []
        if what == "parity":
            return [*mpirun, given.programs / "mutated_parity", *words, "stop"]
        if what == "verify":
            return [*mpirun, given.programs / "mutated_onescale", "verify", "--comm_timeout", "30"]
        return [given.programs / f"mutated_{what}_test", f"--gtest_filter={words[0]}"]

    entries = make.read(given.mutants)
    unknown = set(given.only) - {entry[0] for entry in entries}
    assert not unknown, f"no such mutant: {unknown}"
    pairs = []
    for name, _, _, _, by in entries:
        if given.quick and (by or name in given.only):
            pairs.append((name, by or "parity"))
        elif not given.quick and (not given.only or name in given.only):
            pairs += [(name, one) for one in ([by] if by else ["parity", "verify 4"])]
    for by in sorted({by for _, by in pairs}) if not given.quick else []:
        code, why = run(list(map(str, command(by))), "")
        if code != 0:
            sys.exit(f"{by} fails without a mutant ({code}): {why}")
    survivors = []
    for name, by in sorted(pairs, key=lambda pair: pair[1].split(" ")[0]):
        begin = time.monotonic()
        code, why = run(list(map(str, command(by))), name)
        killed = code not in (0, 2, 124) if by.startswith("verify") else code != 0  # 2: refused to start
        if not killed:
            survivors.append(f"{name} by {by}")
        print(f"{'killed  ' if killed else 'SURVIVES'} {time.monotonic() - begin:4.0f} s  {name}, by {by}: {why[:150]}", flush=True)
    print(f"{len(pairs) - len(survivors)}/{len(pairs)} killed", *survivors, sep="\n  survives: ")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
