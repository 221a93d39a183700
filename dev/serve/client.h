/* client.h -- a connection of ./serve with its request. A client that waits for something is suspended: libmicrohttpd does not
 * look at it until it is woken.
 */
#ifndef SERVE_CLIENT_H
#define SERVE_CLIENT_H

#include "dev/serve/buffer.h"   // defines: Buffer
#include "dev/serve/run_log.h"  // defines: LogPlace

#include <microhttpd.h>

typedef struct Server Server;
typedef struct Client Client;
typedef enum MHD_Result Respond(Server* s, Client* c);

struct Client {
    Server* server;
    struct MHD_Connection* connection;
    int fd;
    bool suspended;
    // the request; all zeros: none
    double since;      // when it began; 0: it is whole
    Respond* respond;  // once it is whole
    Buffer body;
    char run[PATH_CAP];  // the folder of the run that it is about
    uint64_t step;       // of the checkpoint that it asks, or NEWEST
    unsigned status;     // of its response; 0: not known before the first line of the answer
    bool follows;        // the log, from `place` on
    LogPlace place;
    double began, sent;  // when it began to follow; when it was last sent events or a comment
    Buffer out;
    bool done;  // nothing follows `out`
};

static inline void wake(Client* c) {
    if (c->suspended) { MHD_resume_connection(c->connection); }
    c->suspended = false;
}

static inline void suspend(Client* c) {
    MHD_suspend_connection(c->connection);
    c->suspended = true;
}

#endif
