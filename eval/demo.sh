#!/bin/sh
# Asks a trained model the same questions with its recurrent state kept in several ways, and prints the
# bytes of each state and whether the answer is right. Usage: eval/demo.sh PROGRAM
set -eu
program=$(realpath "${1:?usage: eval/demo.sh PROGRAM}")
cd "$(dirname "$0")/.."

cat <<'TEXT'
A small trained language model (18.9 M parameters; six Gated DeltaNet layers, two of attention) works through
four questions. The recurrent state of the six is 1.57 MB of fp32 a sequence. Each line keeps that state another
way; "int4" rounds it to 4 bits after every token and does nothing else.

TEXT
exec "$program" eval --model models/statepack-gdn --data eval/data \
  --state fp32 stepquant:6 leapquant:8 pace:4/8 int4 \
  --ids perm-medium-0052,trace-medium-0051,arith-medium-0067,lists-medium-0067
