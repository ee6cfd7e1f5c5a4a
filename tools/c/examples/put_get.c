/* Puts a sequence of pages, and reads it back as another engine would.
 *
 *   cc put_get.c -llarder -o put_get
 *   ./put_get larder://127.0.0.1:7700
 *
 * Every call that can fail returns a status, and its text is larder_error(). Only wrong arguments
 * fail. A store that is away gives misses, so the program checks those as results.
 */
#include <larder.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGES = 4, PAGE_BYTES = 256 * 1024, PAGE_TOKENS = 16 };

#define SECOND 1000000u

static void check(larder_status status, const char *call) {
    if (status != LARDER_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", call, larder_error());
        exit(1);
    }
}

static void expect(bool holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "not so: %s\n", what);
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: put_get larder://HOST:PORT\n");
        return 2;
    }

    /* 1. Attach. Only clients with an equal namespace share pages, so `identity` names everything
     *    that gives the bytes their meaning. */
    larder_options options = {.url = {argv[1], strlen(argv[1])}, .name = LARDER_TEXT("put_get")};
    larder_namespace pages_of_model = {
        .page_bytes = PAGE_BYTES,
        .parts = 1,
        .identity = LARDER_TEXT("example-model-v1/bf16/16-tokens"),
        .tenant = LARDER_TEXT("examples"),
    };
    larder_client client;
    check(larder_client_open(&options, &pages_of_model, &client), "larder_client_open");
    bool ready;
    check(larder_client_ready(client, 5 * SECOND, &ready), "larder_client_ready");
    expect(ready, "a node is reachable");

    /* 2. Keys. Each depends on all tokens up to the end of its page. */
    larder_key keys[PAGES];
    for (int page = 0; page < PAGES; page++) {
        uint32_t tokens[PAGE_TOKENS];
        for (int token = 0; token < PAGE_TOKENS; token++) tokens[token] = page * PAGE_TOKENS + token;
        const larder_key *previous = page == 0 ? NULL : &keys[page - 1];
        check(larder_page_key(tokens, PAGE_TOKENS, previous, &keys[page]), "larder_page_key");
    }

    /* 3. Put. Pages in a larder_buffer are not copied. Any other memory works too, at one copy. */
    larder_buffer buffer;
    larder_memory block;
    check(larder_buffer_open(client, PAGES * PAGE_BYTES, &buffer, &block, NULL), "larder_buffer_open");
    larder_memory sources[PAGES];
    for (int page = 0; page < PAGES; page++) {
        sources[page] = (larder_memory){block.data + page * PAGE_BYTES, PAGE_BYTES};
        memset(sources[page].data, 'a' + page, PAGE_BYTES);
    }
    larder_put_options put = {.in_sequence = true, .busy_retries = 3};
    larder_put_outcome outcomes[PAGES];
    check(larder_put_from(client, keys, PAGES, sources, PAGES, &put, 5 * SECOND, outcomes), "larder_put_from");
    for (int page = 0; page < PAGES; page++) expect(outcomes[page] == LARDER_PUT_OUTCOME_STORED, "the page is stored");

    /* 4. Look up the prefix, and hold it until it is read. */
    larder_lookup_result found;
    check(larder_lookup(client, keys, PAGES, 10 * SECOND, 5 * SECOND, &found, NULL, NULL), "larder_lookup");
    expect(found.pages == PAGES, "all pages are found");

    /* 5. Get. The client has verified each hit; the memory of a miss is undefined. */
    larder_memory targets[PAGES];
    for (int page = 0; page < PAGES; page++) targets[page] = (larder_memory){malloc(PAGE_BYTES), PAGE_BYTES};
    larder_tier tiers[PAGES];
    check(larder_get_into(client, keys, PAGES, targets, PAGES, 0, 5 * SECOND, tiers), "larder_get_into");
    check(larder_lease_release(found.lease), "larder_lease_release");
    for (int page = 0; page < PAGES; page++) {
        expect(tiers[page] != LARDER_TIER_MISS, "the page is a hit");
        expect(memcmp(targets[page].data, sources[page].data, PAGE_BYTES) == 0, "the bytes are those of the put");
        free(targets[page].data);
    }

    /* 6. Forget, and leave. */
    larder_forget_result forgotten;
    check(larder_forget(client, keys, PAGES, 5 * SECOND, &forgotten), "larder_forget");
    expect(forgotten.complete && forgotten.pages == PAGES, "the pages are forgotten");
    check(larder_exists(client, keys, PAGES, 5 * SECOND, tiers), "larder_exists");
    expect(tiers[0] == LARDER_TIER_MISS, "a forgotten page is a miss");
    check(larder_buffer_close(buffer), "larder_buffer_close");
    check(larder_client_close(client), "larder_client_close");
    printf("larder %s: %d pages put, read and forgotten\n", larder_version(), PAGES);
    return 0;
}
