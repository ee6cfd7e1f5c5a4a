/* Checks of liblarder, run by programs.rs: contract NAME URL [PID of the node]. */
#include <larder.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PARTS = 2, PART_BYTES = 128 * 1024, PAGE_BYTES = PARTS * PART_BYTES };

#define SECOND 1000000u
/* A second for a page whose verification has begun, and one for a busy machine. */
#define GRACE (2 * SECOND)

#define CHECK(holds) \
    do { \
        if (!(holds)) { \
            fprintf(stderr, "%s:%d: not so: %s; last error: %s\n", __FILE__, __LINE__, #holds, larder_error()); \
            _exit(1); \
        } \
    } while (0)
#define OK(call) CHECK((call) == LARDER_STATUS_OK)
/* The call fails with this status and a text that contains `word`. */
#define FAILS(status, word, call) CHECK((call) == LARDER_STATUS_##status && strstr(larder_error(), word))

static const char *url;

static larder_options options_of(const char *address) {
    return (larder_options){.url = {address, strlen(address)}};
}

static const larder_namespace NAMESPACE = {
    .page_bytes = PAGE_BYTES,
    .parts = PARTS,
    .identity = {"contract", 8},
};

static uint64_t now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000ull + time.tv_nsec / 1000;
}

static larder_client open_client(const larder_namespace *space) {
    larder_options options = options_of(url);
    larder_client client;
    OK(larder_client_open(&options, space, &client));
    return client;
}

static larder_client attach_to(const larder_namespace *space) {
    larder_client client = open_client(space);
    bool ready = false;
    OK(larder_client_ready(client, 30 * SECOND, &ready));
    CHECK(ready);
    return client;
}

static larder_client attach(void) {
    return attach_to(&NAMESPACE);
}

static larder_key key_of(uint32_t number) {
    larder_key key;
    OK(larder_page_key(&number, 1, NULL, &key));
    return key;
}

static larder_memory page_of(int byte) {
    larder_memory page = {malloc(PAGE_BYTES), PAGE_BYTES};
    CHECK(page.data);
    memset(page.data, byte, PAGE_BYTES);
    return page;
}

static bool is_filled(larder_memory page, int byte) {
    for (size_t at = 0; at < page.size; at++)
        if (page.data[at] != (uint8_t)byte) return false;
    return true;
}

static larder_put_outcome put(larder_client client, uint32_t number, larder_memory page, uint64_t timeout_us) {
    larder_key key = key_of(number);
    larder_put_outcome outcome = 99;
    OK(larder_put_from(client, &key, 1, &page, 1, NULL, timeout_us, &outcome));
    return outcome;
}

/* Also true if an earlier run has put the page. */
static bool is_stored(larder_put_outcome outcome) {
    return outcome == LARDER_PUT_OUTCOME_STORED || outcome == LARDER_PUT_OUTCOME_ALREADY_THERE;
}

static larder_tier get(larder_client client, uint32_t number, larder_memory page, uint64_t timeout_us) {
    larder_key key = key_of(number);
    larder_tier tier = 99;
    OK(larder_get_into(client, &key, 1, &page, 1, 0, timeout_us, &tier));
    return tier;
}

static void *put_later(void *client) {
    usleep(200000);
    larder_memory page = page_of('f');
    CHECK(put(*(larder_client *)client, 50, page, 10 * SECOND) == LARDER_PUT_OUTCOME_STORED);
    free(page.data);
    return NULL;
}

/* Parts that lie apart, sequences, and memory of a buffer. */
static void check_pages(larder_client client) {
    larder_key keys[2] = {key_of(1), key_of(2)};
    larder_memory a = page_of('a'), b = page_of('b'), parts[4];
    for (int part = 0; part < 4; part++) {
        larder_memory page = part < 2 ? a : b;
        parts[part] = (larder_memory){page.data + part % 2 * PART_BYTES, PART_BYTES};
    }
    const uint32_t token_ids[6] = {1, 2, 3, 4, 5, 70000};
    larder_put_options options = {.in_sequence = true, .position = 3, .ttl_us = 3600u * SECOND};
    options.page_token_ids = 3;
    options.token_ids = token_ids;
    larder_put_outcome outcomes[2];
    OK(larder_put_from(client, keys, 2, parts, 4, &options, 10 * SECOND, outcomes));
    CHECK(outcomes[0] == LARDER_PUT_OUTCOME_STORED && outcomes[1] == LARDER_PUT_OUTCOME_STORED);
    CHECK(put(client, 1, a, 10 * SECOND) == LARDER_PUT_OUTCOME_ALREADY_THERE);
    CHECK(put(client, 1, b, 10 * SECOND) == LARDER_PUT_OUTCOME_REFUSED);

    larder_buffer buffer;
    larder_memory block;
    bool is_shared = false;
    OK(larder_buffer_open(client, 2 * PAGE_BYTES, &buffer, &block, &is_shared));
    CHECK(is_shared && block.size == 2 * PAGE_BYTES);
    larder_memory second = {block.data + PAGE_BYTES, PAGE_BYTES};
    memset(second.data, 'c', PAGE_BYTES);
    CHECK(put(client, 3, second, 10 * SECOND) == LARDER_PUT_OUTCOME_STORED);

    larder_memory into[4] = {
        {block.data, PART_BYTES},
        {b.data, PART_BYTES},
        {a.data, PART_BYTES},
        {block.data + PART_BYTES, PART_BYTES},
    };
    larder_tier tiers[3];
    OK(larder_get_into(client, keys, 2, into, 4, 0, 10 * SECOND, tiers));
    CHECK(tiers[0] != LARDER_TIER_MISS && tiers[1] != LARDER_TIER_MISS);
    CHECK(is_filled(into[0], 'a') && is_filled(into[1], 'a') && is_filled(into[2], 'b') && is_filled(into[3], 'b'));
    CHECK(get(client, 3, a, 10 * SECOND) == LARDER_TIER_L2 && is_filled(a, 'c'));
    CHECK(get(client, 4, a, 10 * SECOND) == LARDER_TIER_MISS);
    OK(larder_buffer_close(buffer));
    free(a.data);
    free(b.data);
}

/* Look-ups, pins, hints, follows, and forgetting of what check_pages has put. */
static void check_steering(larder_client client) {
    larder_key keys[4] = {key_of(1), key_of(2), key_of(99), key_of(3)};
    larder_tier tiers[4];
    OK(larder_exists(client, keys, 4, 10 * SECOND, tiers));
    CHECK(tiers[0] == LARDER_TIER_L2 && tiers[2] == LARDER_TIER_MISS && tiers[3] == LARDER_TIER_L2);

    larder_lookup_result found;
    uint64_t expected_us[4] = {9, 9, 9, 9};
    OK(larder_lookup(client, keys, 4, 10 * SECOND, 10 * SECOND, &found, tiers, expected_us));
    CHECK(found.pages == 2 && found.held == 2 && found.answered && found.retry_after_us == 0 && found.lease.id);
    CHECK(expected_us[0] == 0 && expected_us[1] == 0 && expected_us[2] == 9);
    OK(larder_lease_release(found.lease));
    FAILS(INVALID_HANDLE, "lease", larder_lease_release(found.lease));
    OK(larder_lookup(client, keys, 4, 0, 10 * SECOND, &found, NULL, NULL));
    CHECK(found.pages == 2 && found.lease.id == 0);
    OK(larder_lease_release(found.lease));

    larder_pin_result pinned;
    OK(larder_pin(client, keys, 2, LARDER_PIN_KIND_SOFT, 60u * SECOND, 10 * SECOND, &pinned));
    CHECK(pinned.pages == 2 && pinned.complete && !pinned.refused);
    OK(larder_pin(client, keys, 2, LARDER_PIN_KIND_NONE, 0, 10 * SECOND, &pinned));
    CHECK(pinned.pages == 2);
    size_t pages = 0;
    larder_hint_options hint = {.kind = LARDER_HINT_KIND_RETAIN, .retain_us = 60u * SECOND};
    OK(larder_hint(client, keys, 2, &hint, 10 * SECOND, &pages));
    CHECK(pages == 2);
    OK(larder_warm(client, keys, 2, 10 * SECOND, &pages));
    CHECK(pages == 2);

    pthread_t writer;
    CHECK(pthread_create(&writer, NULL, put_later, &client) == 0);
    larder_key followed = key_of(50);
    larder_memory page = page_of(0);
    larder_follow_end end = 99;
    OK(larder_follow(client, &followed, 1, &page, 30 * SECOND, &end));
    CHECK(end == LARDER_FOLLOW_END_SEALED && is_filled(page, 'f'));
    CHECK(pthread_join(writer, NULL) == 0);

    larder_key all[4] = {keys[0], keys[1], keys[3], followed};
    larder_forget_result forgotten;
    OK(larder_forget(client, all, 4, 10 * SECOND, &forgotten));
    CHECK(forgotten.pages == 4 && forgotten.complete);
    CHECK(get(client, 1, page, 10 * SECOND) == LARDER_TIER_MISS);
    free(page.data);
}

static void calls(void) {
    CHECK(strcmp(larder_version(), LARDER_VERSION) == 0);
    larder_client client = attach();
    larder_client_info info;
    OK(larder_client_describe(client, &info));
    CHECK(info.page_bytes == PAGE_BYTES && info.parts == PARTS && info.part_bytes == PART_BYTES);
    CHECK(info.nodes_connected == 1);
    check_pages(client);
    check_steering(client);
    larder_stats stats;
    OK(larder_client_stats(client, &stats));
    CHECK(stats.puts == 4 && stats.corrupt == 0 && stats.get_hits >= 5 && stats.get_misses == 2);
    OK(larder_client_close(client));
}

enum { CROWD = 400, SMALL_PAGE = PARTS * 1024 };

/* Clients of a crowd of follows, which is more than the node has memory for. */
typedef struct {
    larder_client follower, writer;
} crowd_clients;

static void *put_crowd(void *argument) {
    crowd_clients *clients = argument;
    larder_stats stats = {0};
    uint64_t end = now_us() + 60ull * SECOND;
    while (stats.gets_busy == 0) {
        CHECK(now_us() < end);
        usleep(1000);
        OK(larder_client_stats(clients->follower, &stats));
    }
    larder_memory page = {malloc(SMALL_PAGE), SMALL_PAGE};
    CHECK(page.data);
    for (uint32_t number = 0; number < CROWD; number++) {
        memset(page.data, number % 251, page.size);
        CHECK(put(clients->writer, number, page, 60 * SECOND) == LARDER_PUT_OUTCOME_STORED);
    }
    free(page.data);
    return NULL;
}

/* A node without memory for more follows says so. The others receive their pages. */
static void crowded(void) {
    larder_namespace space = NAMESPACE;
    space.page_bytes = SMALL_PAGE;
    crowd_clients clients = {attach_to(&space), attach_to(&space)};
    uint8_t *memory = calloc(CROWD, SMALL_PAGE);
    CHECK(memory);
    larder_key keys[CROWD];
    larder_memory pages[CROWD];
    larder_follow_end ends[CROWD];
    for (uint32_t at = 0; at < CROWD; at++) {
        keys[at] = key_of(at);
        pages[at] = (larder_memory){memory + at * SMALL_PAGE, SMALL_PAGE};
    }
    pthread_t writer;
    CHECK(pthread_create(&writer, NULL, put_crowd, &clients) == 0);
    OK(larder_follow(clients.follower, keys, CROWD, pages, 3600u * SECOND, ends));
    CHECK(pthread_join(writer, NULL) == 0);
    size_t sealed = 0, busy = 0;
    for (uint32_t at = 0; at < CROWD; at++) {
        sealed += ends[at] == LARDER_FOLLOW_END_SEALED;
        busy += ends[at] == LARDER_FOLLOW_END_BUSY;
        CHECK(ends[at] != LARDER_FOLLOW_END_SEALED || is_filled(pages[at], at % 251));
    }
    CHECK(sealed > 0 && busy > 0 && sealed + busy == CROWD);
    larder_stats stats;
    OK(larder_client_stats(clients.follower, &stats));
    CHECK(stats.gets_busy == busy && stats.get_misses == busy && stats.get_hits == sealed);
    OK(larder_client_close(clients.follower));
    OK(larder_client_close(clients.writer));
    free(memory);
}

static void check_options(void) {
    larder_client client = {0};
    larder_options options = options_of(url);
    larder_namespace space = NAMESPACE;
    FAILS(INVALID_ARGUMENT, "options is null", larder_client_open(NULL, &space, &client));
    FAILS(INVALID_ARGUMENT, "name_space is null", larder_client_open(&options, NULL, &client));
    FAILS(INVALID_ARGUMENT, "client is null", larder_client_open(&options, &space, NULL));
    larder_options wrong = options_of("http://127.0.0.1:1");
    FAILS(INVALID_ARGUMENT, "larder://", larder_client_open(&wrong, &space, &client));
    wrong.url = (larder_text){NULL, 5};
    FAILS(INVALID_ARGUMENT, "url is null", larder_client_open(&wrong, &space, &client));
    wrong.url = LARDER_TEXT("larder://\xff\xfe:1");
    FAILS(INVALID_ARGUMENT, "UTF-8", larder_client_open(&wrong, &space, &client));
    wrong.url = LARDER_TEXT("a\0b");
    FAILS(INVALID_ARGUMENT, "larder://", larder_client_open(&wrong, &space, &client));
    space.page_bytes = 0;
    FAILS(INVALID_ARGUMENT, "page", larder_client_open(&options, &space, &client));
    space.page_bytes = UINT32_MAX;
    space.parts = 1;
    FAILS(INVALID_ARGUMENT, "page", larder_client_open(&options, &space, &client));
    space.parts = 0;
    FAILS(INVALID_ARGUMENT, "equal parts", larder_client_open(&options, &space, &client));
    char name[300];
    memset(name, 'x', sizeof name);
    space = NAMESPACE;
    space.tenant = (larder_text){name, sizeof name};
    FAILS(INVALID_ARGUMENT, "256", larder_client_open(&options, &space, &client));
    larder_kv_layout layout = {LARDER_TEXT("float8"), 4, 2, 64, 16, 2, 1, {0}};
    space = (larder_namespace){.kv = &layout};
    FAILS(INVALID_ARGUMENT, "dtype", larder_client_open(&options, &space, &client));
    layout.dtype = LARDER_TEXT("bfloat16");
    OK(larder_client_open(&options, &space, &client));
    larder_client_info info;
    OK(larder_client_describe(client, &info));
    CHECK(info.parts == 2 && info.page_bytes == 2 * 4 * 2 * 64 * 16 * 2);
    OK(larder_client_close(client));
    CHECK(larder_client_close(client) == LARDER_STATUS_INVALID_HANDLE);
}

static void check_memories(larder_client client) {
    larder_key keys[2] = {key_of(1), key_of(2)};
    larder_memory pages[2] = {page_of(1), page_of(2)};
    larder_tier tiers[2];
    larder_put_outcome outcomes[2];
    larder_memory wrong[2] = {pages[0], {NULL, PAGE_BYTES}};
    FAILS(INVALID_ARGUMENT, "null", larder_get_into(client, keys, 2, wrong, 2, 0, SECOND, tiers));
    FAILS(INVALID_ARGUMENT, "null", larder_put_from(client, keys, 2, wrong, 2, NULL, SECOND, outcomes));
    wrong[1] = (larder_memory){pages[1].data, 0};
    FAILS(INVALID_ARGUMENT, "no bytes", larder_get_into(client, keys, 2, wrong, 2, 0, SECOND, tiers));
    FAILS(INVALID_ARGUMENT, "no bytes", larder_put_from(client, keys, 2, wrong, 2, NULL, SECOND, outcomes));
    wrong[1].size = PAGE_BYTES - 1;
    FAILS(INVALID_ARGUMENT, "instead of", larder_get_into(client, keys, 2, wrong, 2, 0, SECOND, tiers));
    FAILS(INVALID_ARGUMENT, "instead of", larder_put_from(client, keys, 2, wrong, 2, NULL, SECOND, outcomes));
    wrong[1] = pages[0];
    FAILS(INVALID_ARGUMENT, "overlap", larder_get_into(client, keys, 2, wrong, 2, 0, SECOND, tiers));
    FAILS(INVALID_ARGUMENT, "3 memories", larder_get_into(client, keys, 2, pages, 3, 0, SECOND, tiers));
    FAILS(INVALID_ARGUMENT, "memories is null", larder_get_into(client, keys, 2, NULL, 2, 0, SECOND, tiers));
    FAILS(INVALID_ARGUMENT, "tiers is null", larder_get_into(client, keys, 2, pages, 2, 0, SECOND, NULL));
    FAILS(INVALID_ARGUMENT, "86400", larder_get_into(client, keys, 2, pages, 2, 0, UINT64_MAX, tiers));
    FAILS(INVALID_ARGUMENT, "not aligned",
          larder_get_into(client, keys, 2, (larder_memory *)((char *)pages + 1), 2, 0, SECOND, tiers));
    larder_buffer buffer;
    larder_memory block;
    FAILS(INVALID_ARGUMENT, "a buffer has", larder_buffer_open(client, 0, &buffer, &block, NULL));
    FAILS(INVALID_ARGUMENT, "a buffer has", larder_buffer_open(client, SIZE_MAX, &buffer, &block, NULL));
    OK(larder_buffer_open(client, PAGE_BYTES + 1, &buffer, &block, NULL));
    wrong[1] = (larder_memory){block.data + 2, PAGE_BYTES};
    FAILS(INVALID_ARGUMENT, "leaves it", larder_put_from(client, keys, 2, wrong, 2, NULL, SECOND, outcomes));
    OK(larder_buffer_close(buffer));
    FAILS(INVALID_HANDLE, "buffer", larder_buffer_close(buffer));
    OK(larder_get_into(client, NULL, 0, NULL, 0, 0, SECOND, NULL));
    free(pages[0].data);
    free(pages[1].data);
}

static void arguments(void) {
    check_options();
    larder_client client = attach();
    check_memories(client);
    larder_key key = key_of(1);
    larder_tier tier;
    FAILS(INVALID_ARGUMENT, "keys is null", larder_exists(client, NULL, 1, SECOND, &tier));
    FAILS(INVALID_ARGUMENT, "elements", larder_exists(client, &key, SIZE_MAX / 2, SECOND, &tier));
    FAILS(INVALID_ARGUMENT, "86400", larder_exists(client, &key, 1, UINT64_MAX, &tier));
    FAILS(INVALID_ARGUMENT, "key is null", larder_page_key(NULL, 0, NULL, NULL));
    FAILS(INVALID_ARGUMENT, "ready is null", larder_client_ready(client, SECOND, NULL));
    larder_pin_result pinned;
    FAILS(INVALID_ARGUMENT, "kind", larder_pin(client, &key, 1, 7, SECOND, SECOND, &pinned));
    size_t pages;
    larder_hint_options hint = {.kind = LARDER_HINT_KIND_DEMOTE, .retain_us = 1};
    FAILS(INVALID_ARGUMENT, "kind", larder_hint(client, &key, 1, &hint, SECOND, &pages));
    FAILS(INVALID_HANDLE, "client", larder_exists((larder_client){0}, &key, 1, SECOND, &tier));
    FAILS(INVALID_HANDLE, "client", larder_exists((larder_client){UINT64_MAX}, &key, 1, SECOND, &tier));
    larder_buffer buffer;
    larder_memory block;
    OK(larder_buffer_open(client, PAGE_BYTES, &buffer, &block, NULL));
    /* The number of a buffer is no client. */
    FAILS(INVALID_HANDLE, "client", larder_exists((larder_client){buffer.id}, &key, 1, SECOND, &tier));
    OK(larder_client_close(client));
    FAILS(INVALID_HANDLE, "client", larder_client_close(client));
    FAILS(INVALID_HANDLE, "client", larder_exists(client, &key, 1, SECOND, &tier));
    memset(block.data, 1, block.size); /* outlives its client */
    OK(larder_buffer_close(buffer));
}

static void *work(void *argument) {
    larder_client client = *(larder_client *)argument;
    larder_memory page = page_of(0);
    uint32_t number = (uint32_t)(uintptr_t)page.data;
    for (;; number++) {
        larder_key key = key_of(number);
        larder_put_outcome outcome;
        larder_tier tier;
        memset(page.data, number % 251, PAGE_BYTES);
        larder_status status = larder_put_from(client, &key, 1, &page, 1, NULL, 10 * SECOND, &outcome);
        memset(page.data, 255, PAGE_BYTES);
        if (status == LARDER_STATUS_OK) status = larder_get_into(client, &key, 1, &page, 1, 0, 10 * SECOND, &tier);
        if (status == LARDER_STATUS_INVALID_HANDLE) break;
        CHECK(status == LARDER_STATUS_OK);
        /* The node writes to a slow disk. */
        if (outcome == LARDER_PUT_OUTCOME_BUSY && tier == LARDER_TIER_MISS) continue;
        CHECK(tier != LARDER_TIER_MISS && is_filled(page, number % 251));
    }
    CHECK(strstr(larder_error(), "client is not open")); /* the text of this thread */
    free(page.data);
    return NULL;
}

static void threads(void) {
    larder_client client = attach();
    pthread_t workers[4];
    for (int at = 0; at < 4; at++) CHECK(pthread_create(&workers[at], NULL, work, &client) == 0);
    usleep(500000);
    OK(larder_client_close(client));
    for (int at = 0; at < 4; at++) CHECK(pthread_join(workers[at], NULL) == 0);
    CHECK(larder_error()[0] == 0);
}

#define IN_TIME(call) \
    do { \
        uint64_t began = now_us(); \
        call; \
        CHECK(now_us() - began < timeout + GRACE); \
    } while (0)

/* Every call gives the answer of a store that is away, in time. */
static void check_away(larder_client client, uint64_t timeout) {
    larder_key key = key_of(1);
    larder_memory page = page_of(1);
    larder_tier tier = 99;
    IN_TIME(OK(larder_exists(client, &key, 1, timeout, &tier)));
    CHECK(tier == LARDER_TIER_MISS);
    larder_lookup_result found;
    IN_TIME(OK(larder_lookup(client, &key, 1, SECOND, timeout, &found, NULL, NULL)));
    CHECK(found.pages == 0 && !found.answered && found.lease.id == 0);
    IN_TIME(CHECK(get(client, 1, page, timeout) == LARDER_TIER_MISS));
    IN_TIME(CHECK(put(client, 1, page, timeout) == LARDER_PUT_OUTCOME_LOST));
    larder_follow_end end = 99;
    IN_TIME(OK(larder_follow(client, &key, 1, &page, timeout, &end)));
    CHECK(end == LARDER_FOLLOW_END_MISS);
    larder_pin_result pinned;
    IN_TIME(OK(larder_pin(client, &key, 1, LARDER_PIN_KIND_SOFT, SECOND, timeout, &pinned)));
    CHECK(pinned.pages == 0 && !pinned.complete);
    size_t pages = 9;
    larder_hint_options hint = {.kind = LARDER_HINT_KIND_DEMOTE};
    IN_TIME(OK(larder_hint(client, &key, 1, &hint, timeout, &pages)));
    CHECK(pages == 0);
    pages = 9;
    IN_TIME(OK(larder_warm(client, &key, 1, timeout, &pages)));
    CHECK(pages == 0);
    larder_forget_result forgotten;
    IN_TIME(OK(larder_forget(client, &key, 1, timeout, &forgotten)));
    CHECK(forgotten.pages == 0 && !forgotten.complete);
    free(page.data);
}

static void away(void) {
    larder_client client = open_client(&NAMESPACE);
    bool ready = true;
    OK(larder_client_ready(client, SECOND / 5, &ready));
    CHECK(!ready);
    check_away(client, SECOND / 2);
    OK(larder_client_close(client));
}

static void paused(int node) {
    larder_client client = attach();
    larder_memory page = page_of('p');
    CHECK(is_stored(put(client, 7, page, 10 * SECOND)));
    CHECK(kill(node, SIGSTOP) == 0);
    usleep(300000);
    check_away(client, SECOND / 2);
    /* More than a socket takes. The memory is gone when the node reads on. */
    size_t count = 100, bytes = count * PAGE_BYTES;
    uint8_t *many = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(many != MAP_FAILED);
    larder_key keys[100];
    larder_memory pages[100];
    larder_put_outcome outcomes[100];
    for (size_t at = 0; at < count; at++) {
        keys[at] = key_of(1000 + at);
        pages[at] = (larder_memory){many + at * PAGE_BYTES, PAGE_BYTES};
    }
    OK(larder_put_from(client, keys, count, pages, count, NULL, SECOND / 2, outcomes));
    CHECK(outcomes[0] == LARDER_PUT_OUTCOME_LOST && outcomes[count - 1] == LARDER_PUT_OUTCOME_LOST);
    CHECK(munmap(many, bytes) == 0);
    CHECK(kill(node, SIGCONT) == 0);
    uint64_t end = now_us() + 60ull * SECOND;
    while (get(client, 7, page, 5 * SECOND) == LARDER_TIER_MISS) CHECK(now_us() < end);
    CHECK(is_filled(page, 'p'));
    OK(larder_client_close(client));
    free(page.data);
}

/* Sockets of this process, except those between its own threads. */
static int sockets(void) {
    int found = 0;
    for (int descriptor = 3; descriptor < 256; descriptor++) {
        char path[64], target[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
        if (readlink(path, target, sizeof target - 1) > 0 && strncmp(target, "socket:", 7) == 0) found++;
    }
    return found;
}

static void *come_and_go(void *unused) {
    (void)unused;
    for (;;) OK(larder_client_close(attach()));
}

static void in_child(larder_client client, larder_lease lease, larder_buffer buffer, larder_memory block) {
    larder_memory page = page_of(0);
    bool ready = false;
    OK(larder_client_ready(client, 30 * SECOND, &ready));
    CHECK(ready && get(client, 7, page, 10 * SECOND) == LARDER_TIER_L2 && is_filled(page, 'p'));
    memset(page.data, 'q', PAGE_BYTES);
    CHECK(is_stored(put(client, 8, page, 10 * SECOND)));
    larder_key key = key_of(9);
    larder_put_outcome outcome;
    FAILS(FORKED, "forked", larder_put_from(client, &key, 1, &block, 1, NULL, SECOND, &outcome));
    OK(larder_lease_release(lease));
    OK(larder_buffer_close(buffer));
    OK(larder_client_close(client));
    _exit(0);
}

/* Waits for a child. An alarm in the child would not see it hang in a handler of the fork. */
static void join(pid_t child, int number) {
    int status;
    uint64_t end = now_us() + 60ull * SECOND;
    pid_t ended;
    while ((ended = waitpid(child, &status, WNOHANG)) == 0) {
        if (now_us() > end) {
            fprintf(stderr, "the child of fork %d hangs\n", number);
            kill(child, SIGKILL);
            _exit(1);
        }
        usleep(1000);
    }
    CHECK(ended == child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    fprintf(stderr, "the child of fork %d: %s %d\n", number, WIFSIGNALED(status) ? "signal" : "exit status",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    _exit(1);
}

static void forks(void) {
    /* Starts the runtime, which keeps sockets of its own. */
    larder_client first = attach();
    OK(larder_client_close(first));
    for (int tries = 0; tries < 100 && sockets() > 2; tries++) usleep(50000);
    int before = sockets();

    larder_client client = attach();
    larder_memory page = page_of('p'), block;
    CHECK(is_stored(put(client, 7, page, 10 * SECOND)));
    larder_key key = key_of(7);
    larder_lookup_result found;
    OK(larder_lookup(client, &key, 1, 60u * SECOND, 10 * SECOND, &found, NULL, NULL));
    CHECK(found.lease.id);
    larder_buffer buffer;
    OK(larder_buffer_open(client, PAGE_BYTES, &buffer, &block, NULL));
    CHECK(sockets() > before);
    pid_t child = fork();
    if (child == 0) {
        CHECK(sockets() <= before); /* none of the parent's connections */
        in_child(client, found.lease, buffer, block);
    }
    join(child, 0);
    CHECK(get(client, 8, page, 10 * SECOND) == LARDER_TIER_L2 && is_filled(page, 'q'));

    /* Forks while other threads attach and close. */
    pthread_t others[4];
    for (int at = 0; at < 4; at++) CHECK(pthread_create(&others[at], NULL, come_and_go, NULL) == 0);
    for (int number = 1; number <= 200; number++) {
        child = fork();
        if (child == 0) {
            CHECK(sockets() <= before);
            if (number % 20 == 0) OK(larder_client_close(attach()));
            _exit(0);
        }
        join(child, number);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    CHECK(argc >= 3);
    url = argv[2];
    if (strcmp(argv[1], "calls") == 0) calls();
    else if (strcmp(argv[1], "arguments") == 0) arguments();
    else if (strcmp(argv[1], "threads") == 0) threads();
    else if (strcmp(argv[1], "away") == 0) away();
    else if (strcmp(argv[1], "paused") == 0 && argc == 4) paused(atoi(argv[3]));
    else if (strcmp(argv[1], "forks") == 0) forks();
    else if (strcmp(argv[1], "crowded") == 0) crowded();
    else return 2;
    return 0;
}
