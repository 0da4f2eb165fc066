#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_LINES 4096
#define KEY_SIZE 128
#define FULL_KEY_SIZE (KEY_SIZE + 24)

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char *text;
static struct {
	char *key, *value;
	int owned;
} lines[MAX_LINES];
static int line_count, changed, lock_fd = -1;

// Without the variable the state lies beside the library itself, so that a
// library path alone is enough to choose a fake host.
static const char *state_path(void) {
	static char path[4096];
	const char *named = getenv("REFIT_FAKE_GPU_STATE");
	if (named && *named)
		return named;
	Dl_info self;
	if (!dladdr((void *)state_path, &self) || !self.dli_fname)
		return "gpu.state";
	snprintf(path, sizeof path, "%s", self.dli_fname);
	char *slash = strrchr(path, '/');
	snprintf(slash ? slash + 1 : path, sizeof path - (slash ? slash + 1 - path : 0), "gpu.state");
	return path;
}

static char *trimmed(char *s) {
	while (*s == ' ' || *s == '\t')
		s++;
	for (char *end = s + strlen(s); end > s && strchr(" \t\r\n", end[-1]);)
		*--end = 0;
	return s;
}

static void parse(void) {
	line_count = changed = 0;
	int fd = open(state_path(), O_RDONLY | O_CLOEXEC);
	struct stat st;
	if (fd < 0)
		return;
	if (fstat(fd, &st) == 0 && (text = malloc(st.st_size + 1))) {
		ssize_t n = read(fd, text, st.st_size);
		text[n > 0 ? n : 0] = 0;
	}
	close(fd);
	char *next = text;
	while (next && *next && line_count < MAX_LINES) {
		char *line = next;
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		char *equals = strchr(line, '=');
		line = trimmed(line);
		if (!equals || *line == '#')
			continue;
		*equals = 0;
		lines[line_count].key = trimmed(line);
		lines[line_count].value = trimmed(equals + 1);
		lines[line_count++].owned = 0;
	}
}

void state_open(void) {
	pthread_mutex_lock(&mutex);
	char lock[4200];
	snprintf(lock, sizeof lock, "%s.lock", state_path());
	lock_fd = open(lock, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
	if (lock_fd >= 0)
		flock(lock_fd, LOCK_EX);
	parse();
}

static void save(void) {
	char draft[4200];
	snprintf(draft, sizeof draft, "%s.new", state_path());
	FILE *f = fopen(draft, "we");
	if (!f)
		return;
	for (int i = 0; i < line_count; i++)
		if (lines[i].value)
			fprintf(f, "%s=%s\n", lines[i].key, lines[i].value);
	if (fclose(f) == 0)
		rename(draft, state_path());
}

void state_close(void) {
	if (changed)
		save();
	for (int i = 0; i < line_count; i++)
		if (lines[i].owned) {
			free(lines[i].key);
			free(lines[i].value);
		}
	line_count = changed = 0;
	free(text);
	text = NULL;
	if (lock_fd >= 0)
		close(lock_fd);
	lock_fd = -1;
	pthread_mutex_unlock(&mutex);
}

static int find(const char *key) {
	for (int i = line_count - 1; i >= 0; i--)
		if (lines[i].value && !strcmp(lines[i].key, key))
			return i;
	return -1;
}

static const char *full_key(int gpu, const char *key, char *out) {
	if (gpu < 0)
		snprintf(out, FULL_KEY_SIZE, "%s", key);
	else
		snprintf(out, FULL_KEY_SIZE, "gpu.%d.%s", gpu, key);
	return out;
}

const char *state_text(int gpu, const char *key, const char *otherwise) {
	char full[FULL_KEY_SIZE];
	int at = find(full_key(gpu, key, full));
	if (at < 0 && gpu >= 0)
		at = find(key);
	return at < 0 ? otherwise : lines[at].value;
}

long long state_number(int gpu, const char *key, long long otherwise) {
	const char *value = state_text(gpu, key, NULL);
	return value && *value ? strtoll(value, NULL, 0) : otherwise;
}

void state_remove(int gpu, const char *key) {
	char full[FULL_KEY_SIZE];
	full_key(gpu, key, full);
	for (int at; (at = find(full)) >= 0; changed = 1) {
		if (lines[at].owned) {
			free(lines[at].key);
			free(lines[at].value);
		}
		lines[at].value = NULL;
		lines[at].owned = 0;
	}
}

void state_put(int gpu, const char *key, const char *value) {
	char full[FULL_KEY_SIZE];
	char *copy = strdup(value); // value may lie in the line that is removed next
	state_remove(gpu, key);
	if (line_count == MAX_LINES) {
		free(copy);
		return;
	}
	lines[line_count].key = strdup(full_key(gpu, key, full));
	lines[line_count].value = copy;
	lines[line_count++].owned = 1;
	changed = 1;
}

int is_unsupported(int gpu, const char *key) {
	const char *value = state_text(gpu, key, NULL);
	return value && !strcmp(value, "unsupported");
}

int is_root(void) { return !state_number(-1, "not.root", 0); }

// "CODE" fails always, "CODExN" the next N calls, "CODE@K" only the K-th call.
static int counted_fault(int gpu, const char *key) {
	char full[FULL_KEY_SIZE];
	int owner = gpu >= 0 && find(full_key(gpu, key, full)) >= 0 ? gpu : -1;
	const char *value = state_text(owner, key, NULL);
	if (!value || !*value)
		return 0;
	char *rest, left[64];
	long code = strtol(value, &rest, 10);
	if (*rest != 'x' && *rest != '@')
		return (int)code;
	long n = strtol(rest + 1, NULL, 10);
	int fails = *rest == 'x' ? n > 0 : n == 1;
	snprintf(left, sizeof left, "%ld%c%ld", code, *rest, n - 1);
	if (n <= 1)
		state_remove(owner, key);
	else
		state_put(owner, key, left);
	return fails ? (int)code : 0;
}

int planned_fault(int gpu, const char *function) {
	char name[96], key[KEY_SIZE];
	snprintf(name, sizeof name, "%s", function);
	char *suffix = strrchr(name, '_');
	if (suffix && suffix[1] == 'v')
		*suffix = 0;
	snprintf(key, sizeof key, "hang.%s", name);
	if (state_text(gpu, key, NULL)) {
		state_close(); // other processes go on
		for (;;)
			pause();
	}
	snprintf(key, sizeof key, "crash.%s", name);
	if (state_text(gpu, key, NULL)) {
		state_close();
		abort();
	}
	snprintf(key, sizeof key, "slow.%s", name);
	long long ms = state_number(gpu, key, 0);
	if (ms > 0) {
		struct timespec span = {ms / 1000, ms % 1000 * 1000000};
		state_close();
		nanosleep(&span, NULL);
		state_open();
	}
	snprintf(key, sizeof key, "fail.%s", name);
	return counted_fault(gpu, key);
}
