-- The keys and values of a model's queue, for the scripts that include it. KEYS[1] is the shared stream of jobs.
--
-- This file defines no functions: a script that returns early needs none, and one costs as much as a quarter of a command.
local GROUP = 'workers'
-- In a waiting key in place of an entry: the job is in the backlog; the row was just stored.
local LATER, DONE = 'later', 'done'
-- Field "p" of entries that yield to others, and ROWS for entries that do not. See "Priorities" in docs/design/queue.md.
local BULK, CONTINUED, ROWS = 'bulk', 'continued', ''
-- Max unread messages in a reply stream of a client that still gets rows in messages, and max bytes of rows per message.
local MAX_WITH_ROWS, MAX_CARRIED_BYTES = 64, 65536
local jobs = KEYS[1]
local base = string.sub(jobs, 1, -6)
local backlog, sole_client, capacities = base .. ':backlog', base .. ':sole_client', base .. ':capacity'
local lanes, lane_of, deadlines = base .. ':lanes', base .. ':lane:', base .. ':workers'
-- Prefixes of waiting keys, of all reply keys, and of the reply keys of bulk clients.
local waiting_for, replies, bulk_replies = base .. ':waiting:', base .. ':reply', base .. ':reply:bulk:'
