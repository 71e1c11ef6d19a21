-- The names of a model's queue, for the scripts that include it. See fair_queue.lua and lanes.lua. There are no functions here:
-- making one costs as much as a quarter of a command, and what is done most often needs none.
local GROUP = 'workers'
-- What a waiting key has instead of an entry: the job is in the backlog; its row has just been stored.
local LATER, DONE = 'later', 'done'
-- What an entry says in its field "p" if it yields to others: only bulk clients wait for it, or it is a continuation that
-- another client waits for. Entries that do not yield have no such field.
local BULK, CONTINUED = 'bulk', 'continued'
local jobs = KEYS[1]
local base = string.sub(jobs, 1, -6)
local backlog, sole_client, capacities = base .. ':backlog', base .. ':sole_client', base .. ':capacity'
local lanes, lane_of, deadlines = base .. ':lanes', base .. ':lane:', base .. ':workers'
-- What waiting keys and reply keys begin with, and those of bulk clients.
local waiting_for, replies, bulk_replies = base .. ':waiting:', base .. ':reply', base .. ':reply:bulk:'
-- Messages in a reply stream beyond which further ones carry no rows, for their client does not read, or may not remove what it
-- has read; and bytes of rows in one message.
local MAX_WITH_ROWS, MAX_CARRIED = 64, 65536
