"""Runs the parity suite, `onescale verify` or both on every mutant; each must see each.

run.py MUTANTS MPIRUN [--parity PROGRAM] [--verify ONESCALE] [--only NAME]...
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
    """(exit code, the last line that says why)"""
    env = {**os.environ, "ONESCALE_MUTANT": mutant, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return 124, "no end"
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("onescale:", "verify:", "DIFFERS"))]
    return done.returncode, said[0] if said else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mutants")
    parser.add_argument("mpirun")
    parser.add_argument("--parity")
    parser.add_argument("--verify")
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args()
    names = [entry[0] for entry in make.read(given.mutants) if not given.only or entry[0] in given.only]
    assert len(names) == (len(given.only) or len(names)), "no such mutant"
    mpirun = given.mpirun.split(" ")
    checks = {}
    if given.parity:
        checks["parity"] = ([*mpirun, "-n", "8", given.parity, "stop"], lambda code: code != 0)
    if given.verify:
        checks["verify"] = ([*mpirun, "-n", "4", given.verify, "verify", "--comm_timeout", "30"], lambda code: code not in (0, 2, 124))  # 2: refused to start
    failed = False
    for check, (command, kills) in checks.items():
        if not given.only:
            code, why = run(command, "")
            if code != 0:
                sys.exit(f"{check} fails without a mutant ({code}): {why}")
        survivors = []
        for name in names:
            begin = time.monotonic()
            code, why = run(command, name)
            if not kills(code):
                survivors.append(name)
            print(f"{'killed  ' if kills(code) else 'SURVIVES'} {time.monotonic() - begin:4.0f} s  {name}: {why[:150]}", flush=True)
        print(f"{check}: {len(names) - len(survivors)}/{len(names)} mutants killed", *survivors, sep="\n  survives: ", flush=True)
        failed |= bool(survivors)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
