/* Runs kernels for another process, which may have another processor: requests on stdin, answers on stdout.
 *
 * A request is this head, then `size` bytes of memory, then the places of `pointers` pointers in it, which are given as
 * offsets into it. The answer is a number, what a plain function returned, and the memory.
 */
#include "pool.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char name[32];
    int64_t arguments; /* offset of a structure; or the number that a plain function takes */
    int64_t shares, workers, size, pointers;
} request;

kernel round_rows, linear_few, linear_many, layer_norm, rms_norm, glu, embed, rotary_angles, rotary, take_rows, store_kv,
    attention, argmax, sample, scale_logits, route, linear_experts, combine, uniforms, add_changes,
    keep_allowed;
int64_t linear_scratch(void), wide_rows(int64_t), sum_parts(int64_t), attention_scratch(int64_t),
    sample_scratch(int64_t), attention_parts(const void *);

#define NAMED(name) {#name, name}
static const struct {
    const char *name;
    kernel *run;
} kernels[] = {NAMED(round_rows), NAMED(linear_few), NAMED(linear_many), NAMED(layer_norm), NAMED(rms_norm),
               NAMED(glu), NAMED(embed), NAMED(rotary_angles), NAMED(rotary), NAMED(take_rows), NAMED(store_kv),
               NAMED(attention), NAMED(argmax), NAMED(sample), NAMED(scale_logits), NAMED(route),
               NAMED(linear_experts), NAMED(combine), NAMED(uniforms), NAMED(add_changes),
               NAMED(keep_allowed)};

static int64_t call(const request *r, const char *memory) {
    if (!strcmp(r->name, "linear_scratch")) return linear_scratch();
    if (!strcmp(r->name, "wide_rows")) return wide_rows(r->arguments);
    if (!strcmp(r->name, "sum_parts")) return sum_parts(r->arguments);
    if (!strcmp(r->name, "attention_scratch")) return attention_scratch(r->arguments);
    if (!strcmp(r->name, "sample_scratch")) return sample_scratch(r->arguments);
    if (!strcmp(r->name, "attention_parts")) return attention_parts(memory + r->arguments);
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (!strcmp(r->name, kernels[i].name)) {
            launch one = {kernels[i].run, memory + r->arguments, r->shares};
            run_program(&one, 1, r->workers, 0);
            return 0;
        }
    fprintf(stderr, "there is no kernel %s\n", r->name);
    exit(1);
}

/* Makes addresses of offsets, or offsets of addresses. */
static void shift(char *memory, const int64_t *places, int64_t count, intptr_t by) {
    for (int64_t i = 0; i < count; i++) {
        intptr_t pointer;
        memcpy(&pointer, memory + places[i], sizeof pointer);
        pointer += by;
        memcpy(memory + places[i], &pointer, sizeof pointer);
    }
}

int main(void) {
    request r;
    while (fread(&r, sizeof r, 1, stdin) == 1) {
        char *memory = aligned_alloc(64, (r.size + 127) / 64 * 64);
        int64_t *places = malloc(sizeof(int64_t) * (r.pointers + 1));
        if (fread(memory, 1, r.size, stdin) != (size_t)r.size) return 1;
        if (fread(places, sizeof *places, r.pointers, stdin) != (size_t)r.pointers) return 1;
        shift(memory, places, r.pointers, (intptr_t)memory);
        int64_t number = call(&r, memory);
        shift(memory, places, r.pointers, -(intptr_t)memory);
        fwrite(&number, sizeof number, 1, stdout);
        fwrite(memory, 1, r.size, stdout);
        fflush(stdout);
        free(memory);
        free(places);
    }
    return 0;
}
