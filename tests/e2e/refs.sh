#!/usr/bin/env bash
# `ingot eval --tokens ... --logits` beside the reference logits, through the command itself, for every
# case of the architectures and block types that ingot has. Float files: largest difference below
# 1e-4 on the scalar level. Others: at most 1.3 times the root mean square difference that the case
# states, on every level of this CPU. Prints the table.
cd "$(dirname "$0")/../.." || exit 2
ingot=${INGOT:-build/ingot}
refs=${INGOT_SHARED:-../shared}/refs
if [ ! -d "$refs" ]; then
    echo "skipped: $refs is not there"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
exec python3 - "$ingot" "$refs" <<'PY'
import array, glob, json, math, os, subprocess, sys, tempfile

ingot, refs = sys.argv[1:]
archs = {"llama", "qwen2", "qwen3"}
types = set("F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split())
levels = subprocess.run([ingot, "devices", "--json"], capture_output=True, text=True).stdout
levels = [l for l in ("scalar", "avx2", "avx512", "avx512vnni") if l in levels.replace('"', " ").split()]
out = os.path.join(tempfile.mkdtemp(), "logits")
passed = failed = 0

def floats(path):
    a = array.array("f")
    a.frombytes(open(path, "rb").read())
    return a

for path in sorted(glob.glob(os.path.join(refs, "*.json"))):
    base = path[:-5]
    case = json.load(open(path)) if not base.endswith(".tok") else {}
    if case.get("architecture") not in archs or not set(case["tensor_types"]) <= types:
        continue
    if "moe" in os.path.basename(base): # experts come with a later architecture row
        continue
    exact = set(case["tensor_types"]) == {"F32"}
    want = floats(base + (".logits" if exact else ".dequant.logits"))
    ids = ",".join(open(base + ".tokens").readline().split())
    for level in levels:
        run = subprocess.run([ingot, "eval", base + ".gguf", "--tokens", ids, "--logits", out, "--kv", "f32"],
                             env=dict(os.environ, INGOT_ISA=level), capture_output=True, text=True)
        got = floats(out) if run.returncode == 0 else array.array("f")
        if len(got) != len(want):
            print(f"FAILED {os.path.basename(base)} {level}: {run.stderr.strip() or 'wrong number of rows'}")
            failed += 1
            continue
        diff = [a - b for a, b in zip(got, want)]
        rms, most = math.sqrt(sum(d * d for d in diff) / len(diff)), max(map(abs, diff))
        bound = 1e-4 if exact else 1.3 * case["quantized_activation_rms_diff"]
        good = (most if exact else rms) < bound
        print(f"  {os.path.basename(base):18} {level:10} rms {rms:.6f}  largest {most:.6f}  allowed "
              f"{'largest' if exact else 'rms'} {bound:.6f}{'' if good else '  FAILED'}")
        passed += good
        failed += not good
if not passed + failed:
    print("FAILED: no case was found")
    failed = 1
print(f"{passed} passed, {failed} failed, 0 skipped")
sys.exit(failed > 0)
PY
