/* Rows gathered from a file: one positioned read a row, the disk told of the next ones beforehand.
 *
 * A read that fails is reported with its row, never turned into a signal as a memory map would. Knows bytes only.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

enum { ROWS_AHEAD = 64 };

static void announce(int file, int64_t offset, int64_t bytes)
{
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(file, offset, bytes, POSIX_FADV_WILLNEED);
#else
    (void)file, (void)offset, (void)bytes;
#endif
}

/* Returns how many rows were read; if fewer than `count`, `error` holds errno, or 0 if the file ended inside the row. */
int64_t kvist_read_rows(int file, int64_t base, int64_t row_bytes, const int64_t *ids, int64_t count, uint8_t *out, int *error)
{
    for (int64_t n = 0; n < count && n < ROWS_AHEAD && count > 1; n++) announce(file, base + ids[n] * row_bytes, row_bytes);
    for (int64_t n = 0; n < count; n++) {
        if (n + ROWS_AHEAD < count) announce(file, base + ids[n + ROWS_AHEAD] * row_bytes, row_bytes);
        for (int64_t filled = 0; filled < row_bytes;) {
            ssize_t got = pread(file, out + n * row_bytes + filled, (size_t)(row_bytes - filled), base + ids[n] * row_bytes + filled);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) {
                *error = got < 0 ? errno : 0;
                return n;
            }
            filled += got;
        }
    }
    return count;
}
