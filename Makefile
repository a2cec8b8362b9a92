# ingot: one file that serves language models. `make quickstart` sets up, builds and answers;
# `make check` runs every test that needs no GPU. B= chooses the build folder.
B       ?= build
CC      := gcc
MODE    ?= release
WERROR  ?=
# Commands are shown by one word and the file; V=1 shows them whole.
run      = $(if $(V),$(2),@echo '  $(1) $@' && $(2))

FOLDERS := base gguf text store backends backends/cpu engine cli
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wno-unused-parameter $(WERROR)
OPT_release := -O3 -DNDEBUG
OPT_asan    := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT_tsan    := -O1 -fsanitize=thread
OPT_fuzz    := -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
ifeq ($(MODE),fuzz)
CC      := clang
endif
CFLAGS  := -std=gnu11 -g $(OPT_$(MODE)) $(WARN) -ffp-contract=off -fno-math-errno -D_GNU_SOURCE= -I. -pthread $(EXTRA_CFLAGS)
LIBS    := -lsqlite3 -lmbedcrypto -ljansson -lpcre2-8 -lutf8proc -lzstd -lz -lxxhash -lm
LDFLAGS := -pthread $(filter -fsanitize=%,$(OPT_$(MODE)))
ifeq ($(MODE),release)
LDFLAGS += -static -Wl,--gc-sections -Wl,--wrap=dlopen -Wl,-u,__wrap_dlopen  # base/no_dlopen.c
CFLAGS  += -ffunction-sections -fdata-sections
endif

# One file an ISA level, each with its own flags; everything else is plain x86-64 (or the host's base).
ifneq ($(findstring x86_64,$(shell $(CC) -dumpmachine)),)
ISA_avx2   := -mavx2 -mfma -mf16c -mbmi2
ISA_avx512 := $(ISA_avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512cd -mprefer-vector-width=512
ISA_avx512vnni := $(ISA_avx512) -mavx512vnni
endif

SRC     := $(foreach f,$(FOLDERS),$(wildcard $(f)/*.c))
OBJ     := $(SRC:%.c=$(B)/%.o)
libobj   = $(filter $(B)/$(1)/%.o,$(OBJ))
ARCHIVES := $(B)/libcli.a $(B)/libengine.a $(B)/libtext.a $(B)/libstore.a $(B)/libbackends.a $(B)/libgguf.a $(B)/libbase.a
UNIT    := $(patsubst tests/unit/%.c,$(B)/unit/%,$(wildcard tests/unit/test_*.c))
EMULATED := $(addprefix $(B)/unit/,test_cpu_emulated test_refs_emulated test_engine_emulated)
TOOLS   := $(patsubst tests/tools/%.c,$(B)/tools/%,$(wildcard tests/tools/*.c))
FUZZ    := $(patsubst tests/fuzz/%.c,$(B)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))

all: $(B)/ingot

$(B)/ingot: $(B)/main.o $(ARCHIVES)
	$(call run,LINK,$(CC) $(LDFLAGS) -o $@ $^ $(LIBS))

$(B)/lib%.a:
	@rm -f $@ && ar rcs $@ $^
define archive
$(B)/lib$(1).a: $$(call libobj,$(1))
endef
$(foreach f,base gguf text store backends engine cli,$(eval $(call archive,$(f))))

isa      = $(ISA_$(lastword $(subst _, ,$(basename $(notdir $(1))))))
$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(call run,CC  ,$(CC) $(CFLAGS) $(call isa,$<) -MMD -MP -c -o $@ $<)

$(B)/unit/%: $(B)/tests/unit/%.o $(B)/tests/unit/unit.o $(B)/tests/unit/tiny.o $(B)/tests/unit/oracle.o $(ARCHIVES)
	@mkdir -p $(@D)
	$(call run,LINK,$(CC) $(LDFLAGS) -o $@ $^ $(LIBS))
$(B)/unit/test_engine_sim: LDFLAGS += -Wl,--wrap=now_ns
# The AVX-512 kernels on any machine: compiled against tests/simde's stand-in for the intrinsics.
EMU := $(B)/emu/kern_avx512.o $(B)/emu/kern_avx512vnni.o $(B)/tests/simde/emulated.o
$(B)/emu/%.o: backends/cpu/%.c tests/simde/immintrin.h $(wildcard backends/cpu/*.h)
	@mkdir -p $(@D)
	$(call run,CC  ,$(CC) $(filter-out -W%,$(CFLAGS)) -w -O1 -fno-inline-functions -DUNROLL= -Itests/simde -c -o $@ $<)
$(B)/unit/%_emulated: $(B)/tests/unit/%.o $(B)/tests/unit/unit.o $(B)/tests/unit/tiny.o $(B)/tests/unit/oracle.o $(EMU) $(ARCHIVES)
	@mkdir -p $(@D)
	$(call run,LINK,$(CC) $(LDFLAGS) -o $@ $^ $(LIBS))
$(B)/tools/%: $(B)/tests/tools/%.o $(B)/tests/unit/tiny.o $(ARCHIVES)
	@mkdir -p $(@D)
	$(call run,LINK,$(CC) $(LDFLAGS) -o $@ $^ $(LIBS))
$(B)/fuzz/%: $(B)/tests/fuzz/%.o $(ARCHIVES)
	@mkdir -p $(@D)
	$(call run,LINK,$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $^ $(LIBS))

# ---- what people type ----

SHARED  ?= ../shared
export INGOT_SHARED ?= $(abspath $(SHARED))

deps:
	deploy/deps.sh
quickstart: deps
	@$(MAKE) --no-print-directory -j2 all
	deploy/quickstart.sh $(B)/ingot
install: all
	install -D -m 755 $(B)/ingot $(DESTDIR)$(or $(PREFIX),/usr/local)/bin/ingot

unit: $(UNIT)
tools: $(TOOLS)
fuzzers: $(FUZZ)
test-unit: unit
	tests/run.sh $(UNIT)
emulated: $(EMULATED)
	tests/run.sh $(EMULATED)
asan:
	@$(MAKE) --no-print-directory -j2 MODE=asan B=$(B)-asan unit
	tests/run.sh $(UNIT:$(B)/%=$(B)-asan/%)
tsan:
	@$(MAKE) --no-print-directory -j2 MODE=tsan B=$(B)-tsan $(TSAN:%=$(B)-tsan/unit/%)
	tests/run.sh $(TSAN:%=$(B)-tsan/unit/%)
TSAN := test_engine test_engine_storm test_cpu test_store test_prefix_store test_prefix_cache \
	test_bench_serve test_models test_models_waits
fuzz:
	@$(MAKE) --no-print-directory -j2 MODE=fuzz B=$(B)-fuzz fuzzers
	tests/fuzz/run.sh $(B)-fuzz/fuzz
e2e: all tools
	INGOT=$(B)/ingot tests/run.sh tests/e2e/*.sh tests/fault/*.sh
tidy:
	tests/tidy.sh
format:
	clang-format -i $(shell git ls-files '*.c' '*.h')
bench: all tools
	tests/bench.sh $(B)
bench-kernels: $(B)/tools/bench_kernels
	$<

# Everything that needs no GPU. Each step prints its own counts; the last line adds them up.
check:
	deploy/deps.sh check
	tests/check.sh $(B)

clean:
	rm -rf $(B) $(B)-asan $(B)-tsan $(B)-fuzz

.PHONY: all deps quickstart install unit tools fuzzers test-unit asan tsan emulated fuzz e2e tidy format bench bench-kernels check clean
.SECONDARY:
-include $(OBJ:.o=.d) $(B)/main.d $(wildcard $(B)/tests/*/*.d)
