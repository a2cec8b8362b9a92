/* Small strings in the catalogue: settings by key, saved chats by name. Buffers and lists are the
 * caller's. */
#include <string.h>

#include "store/store_internal.h"

enum { SETTING_KEY_BYTES = 200, SETTING_BYTES = 1 << 20, CHAT_BYTES = 64 << 20 };

/* The one text that `sql` finds for `key`; *found says whether. */
static int get_text(bool *found, struct buf *out, struct store *s, const char *sql, const char *key,
                    struct err *e)
{
    sqlite3_stmt *st = NULL;
    *found = false;
    buf_clear(out);
    pthread_mutex_lock(&s->lock);
    int rc = db_query(&st, s->db, e, sql, "s", key);
    if (!rc && !(rc = db_step(found, st, e)) && *found) {
        const void *p = sqlite3_column_text(st, 0);
        if (p)
            buf_put(out, p, (size_t)sqlite3_column_bytes(st, 0));
        if (!p || out->failed)
            rc = err_set(e, ERR_MEMORY, "out of memory reading '%.100s' from the store", key);
    }
    sqlite3_finalize(st);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static int put_text(struct store *s, const char *sql, const char *key, const char *text,
                    struct err *e)
{
    if (store_writable(s, e))
        return -1;
    pthread_mutex_lock(&s->lock);
    int rc = db_run(s->db, e, sql, "ss", key, text);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static int check_sizes(const char *what, const char *key, size_t n, size_t most, struct err *e)
{
    size_t nk = strlen(key);
    if (!nk || nk > SETTING_KEY_BYTES || !utf8_valid(key, nk))
        return err_set(e, ERR_USAGE, "the name of a %s is text of 1 to %d bytes", what,
                       SETTING_KEY_BYTES);
    if (n > most)
        return err_set(e, ERR_LIMIT, "the %s '%s' has %zu bytes; at most %zu are kept", what, key,
                       n, most);
    return 0;
}

int store_get_setting(struct store *s, struct buf *out, const char *key, struct err *e)
{
    bool found;
    return get_text(&found, out, s, "SELECT value FROM setting WHERE key = ?1", key, e);
}

int store_set_setting(struct store *s, const char *key, const char *value, struct err *e)
{
    if (check_sizes("setting", key, strlen(value), SETTING_BYTES, e))
        return -1;
    return put_text(s, "INSERT OR REPLACE INTO setting(key, value) VALUES(?1, ?2)", key, value, e);
}

int store_save_chat(struct store *s, const char *name, const char *json, struct err *e)
{
    if (check_sizes("chat", name, strlen(json), CHAT_BYTES, e))
        return -1;
    return put_text(s, "INSERT OR REPLACE INTO chat(name, json, saved) VALUES(?1, ?2, unixepoch())",
                    name, json, e);
}

int store_load_chat(struct store *s, struct buf *out, const char *name, struct err *e)
{
    bool found;
    if (get_text(&found, out, s, "SELECT json FROM chat WHERE name = ?1", name, e))
        return -1;
    return found ? 0 : err_set(e, ERR_NOT_FOUND, "no saved chat '%.100s'; /save makes one", name);
}

int store_list_chats(struct store *s, struct store_chat **out, size_t *n, struct err *e)
{
    sqlite3_stmt *st = NULL;
    struct store_chat *all = NULL;
    size_t used = 0, cap = 0;
    bool row = true;
    *out = NULL;
    *n = 0;
    pthread_mutex_lock(&s->lock);
    int rc = db_query(&st, s->db, e, "SELECT name, saved FROM chat ORDER BY saved DESC, name", "");
    while (!rc && !(rc = db_step(&row, st, e)) && row) {
        if (used == cap) {
            cap = cap ? cap * 2 : 8;
            struct store_chat *more = mem_realloc(all, cap * sizeof *all);
            if (!more) {
                rc = err_set(e, ERR_MEMORY, "out of memory listing the saved chats");
                break;
            }
            all = more;
        }
        if (db_text(all[used].name, sizeof all[used].name, st, 0))
            all[used++].saved = sqlite3_column_int64(st, 1);
    }
    sqlite3_finalize(st);
    pthread_mutex_unlock(&s->lock);
    if (rc) {
        mem_free(all);
        return -1;
    }
    *out = all;
    *n = used;
    return 0;
}
