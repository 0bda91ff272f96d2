/* Our own threads. Each spins for a moment before it sleeps: operations in a row then wake no
   thread, and the engine's threads keep their cores. They may run on all CPUs of the process's
   first thread: the caller may be a thread that an engine's OpenMP has bound to one core. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "native.h"

#define SPIN_NS 50000

static struct {
    pthread_mutex_t operation; /* one at a time */
    int started;               /* threads besides the caller's */
    atomic_int round;          /* goes up by one with every call */
    atomic_int working;
    int threads;
    void (*work)(void *, int, int);
    void *argument;
} pool = {.operation = PTHREAD_MUTEX_INITIALIZER};

/* --- Time on paper: what operations would take with a core for each thread. It is the CPU time of
   the caller, but of the threads of a call that of the busiest one alone. While it is counted they
   compute one after the other, so that none takes another's core or cache; and in one memory, which
   is in the cache as each one's own would be. --- */

static struct {
    int is_counted;
    long ns;
} on_paper; /* of one operation at a time */

static long cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* Seconds since the last call of this function, which decides whether more are counted. */
double native_time_on_paper(int is_counted)
{
    pthread_mutex_lock(&pool.operation);
    double seconds = on_paper.ns * 1e-9;
    on_paper.ns = 0;
    on_paper.is_counted = is_counted;
    pthread_mutex_unlock(&pool.operation);
    return seconds;
}

static void work_on_paper(int threads, void (*work)(void *, int, int), void *argument)
{
    long first = cpu_ns();
    long begin = first;
    long busiest = 0;
    for (int thread = 0; thread < threads; thread++) {
        work(argument, thread, threads);
        long end = cpu_ns();
        if (end - begin > busiest)
            busiest = end - begin;
        begin = end;
    }
    on_paper.ns += busiest - (begin - first); /* all of it is in the caller's time */
}

void begin_operation(void)
{
    pthread_mutex_lock(&pool.operation);
    if (on_paper.is_counted)
        on_paper.ns -= cpu_ns();
}

void end_operation(void)
{
    if (on_paper.is_counted)
        on_paper.ns += cpu_ns();
    pthread_mutex_unlock(&pool.operation);
}

/* --- Memory: mapped buffers that only grow. In the C library's heap, freed memory would stay
   beside what is taken next. --- */

/* The first line of a buffer has its length, so that one pointer names all of it: a process may
   fork at any moment, and its child then finds a whole buffer or none. While a buffer is not at
   its place, no pointer leads to it. */
struct buffer {
    size_t bytes;
};
enum { LINE = 64, PAGE = 4096, HUGE_PAGE = 2 << 20 };

static struct buffer *_Atomic kept[MOST_THREADS];
static struct buffer *_Atomic passing;

#ifdef __SANITIZE_ADDRESS__ /* what an operation did not ask for is not to be touched */
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(from, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(from, bytes) ((void)0)
#endif

void use_huge_pages(void *memory, size_t bytes)
{
    uintptr_t first = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE;
    uintptr_t past = ((uintptr_t)memory + bytes) / PAGE * PAGE;
    if (bytes >= HUGE_PAGE) /* a refusal costs speed alone */
        madvise((void *)first, past - first, MADV_HUGEPAGE);
}

static void *at_least_so_large(struct buffer *_Atomic *place, size_t bytes)
{
    struct buffer *buffer = *place;
    size_t wanted = (LINE + bytes + PAGE - 1) / PAGE * PAGE;
    if (buffer)
        ASAN_UNPOISON_MEMORY_REGION(buffer, buffer->bytes);
    if (!buffer || buffer->bytes < wanted) {
        void *grown;
        *place = NULL;
        if (buffer) /* its pages move with it: never are two buffers there */
            grown = mremap(buffer, buffer->bytes, wanted, MREMAP_MAYMOVE);
        else
            grown = mmap(NULL, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (grown == MAP_FAILED) {
            *place = buffer;
            return NULL;
        }
        buffer = grown;
        use_huge_pages(buffer, wanted); /* all of it: mremap takes no mapping of two kinds */
        buffer->bytes = wanted;
        *place = buffer;
    }
    char *memory = (char *)buffer + LINE;
    ASAN_POISON_MEMORY_REGION(memory + bytes, buffer->bytes - LINE - bytes);
    return memory;
}

void *thread_memory(int thread, size_t bytes)
{
    return at_least_so_large(&kept[on_paper.is_counted ? 0 : thread], bytes);
}

void *passing_memory(size_t bytes) { return at_least_so_large(&passing, bytes); }

/* --- Threads --- */

static long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* Waits until *value is no longer `old`: awake for SPIN_NS, then asleep. */
static void wait_while(atomic_int *value, int old)
{
    long start = now_ns();
    while (atomic_load_explicit(value, memory_order_acquire) == old)
        if (now_ns() - start >= SPIN_NS)
            syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, old, NULL, NULL,
                    0); /* returns at once if it has changed */
        else
            for (int i = 0; i < 32; i++)
                __builtin_ia32_pause();
}

static void wake(atomic_int *value)
{
    syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void *thread_main(void *number)
{
    int thread = (int)((long)number >> 32);
    unsigned round = (unsigned)(long)number;
    for (;;) {
        wait_while(&pool.round, (int)round);
        round++;
        if (thread < pool.threads)
            pool.work(pool.argument, thread, pool.threads);
        if (atomic_fetch_sub(&pool.working, 1) == 1)
            wake(&pool.working);
    }
    return NULL;
}

/* A child of fork has none of the threads, and the lock as it was at that moment. */
static void forget_threads(void)
{
    pthread_mutex_init(&pool.operation, NULL);
    pool.started = 0;
}

/* When the library is loaded: a process of one thread of ours may have others, which fork. */
__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forget_threads);
}

/* The CPUs of the process's first thread, to be freed, and the bytes of their set; NULL if the
   system does not tell. A set of fixed size would be too small where there are more than 1024. */
static cpu_set_t *own_cpus(size_t *bytes)
{
    for (int most = 1024; most <= 1 << 20; most *= 2) {
        cpu_set_t *cpus = CPU_ALLOC(most);
        *bytes = CPU_ALLOC_SIZE(most);
        if (cpus && !sched_getaffinity(getpid(), *bytes, cpus))
            return cpus;
        CPU_FREE(cpus);
        if (errno != EINVAL) /* that is of a set which is too small */
            break;
    }
    return NULL;
}

int thread_count(void)
{
    const char *wanted = getenv("TF_NUM_INTRAOP_THREADS");
    int threads = wanted ? atoi(wanted) : 0;
    size_t bytes;
    cpu_set_t *cpus = threads < 1 ? own_cpus(&bytes) : NULL;
    if (cpus)
        threads = CPU_COUNT_S(bytes, cpus);
    CPU_FREE(cpus);
    if (threads > MOST_THREADS)
        return MOST_THREADS;
    return threads < 1 ? 1 : threads;
}

static void start_threads(int wanted)
{
    if (pool.started >= wanted)
        return;
    pthread_attr_t attributes;
    size_t bytes;
    cpu_set_t *cpus = own_cpus(&bytes);
    pthread_attr_init(&attributes);
    if (cpus)
        pthread_attr_setaffinity_np(&attributes, bytes, cpus);
    CPU_FREE(cpus);
    while (pool.started < wanted) {
        pthread_t thread;
        long number = ((long)(pool.started + 1) << 32) | (unsigned)atomic_load(&pool.round);
        if (pthread_create(&thread, &attributes, thread_main, (void *)number))
            break;
        pthread_detach(thread);
        pool.started++;
    }
    pthread_attr_destroy(&attributes);
}

void run_on_threads(int threads, void (*work)(void *, int, int), void *argument)
{
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (on_paper.is_counted) {
        work_on_paper(threads, work, argument);
        return;
    }
    start_threads(threads - 1);
    if (threads == 1 ||
        pool.started <
            threads - 1) { /* shares are fixed: one thread after the other, with the same result */
        for (int thread = 0; thread < threads; thread++)
            work(argument, thread, threads);
    } else {
        pool.work = work;
        pool.argument = argument;
        pool.threads = threads;
        atomic_store(&pool.working, pool.started);
        atomic_fetch_add(&pool.round, 1);
        wake(&pool.round);
        work(argument, 0, threads);
        for (int left; (left = atomic_load(&pool.working));)
            wait_while(&pool.working, left);
    }
}
