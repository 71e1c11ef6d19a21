-- Lua variables for the keys of one model's queue and for values in these keys. See protocol/keys.py for all keys of a pool.
-- Other scripts include this file. KEYS[1] of each script is the shared stream of jobs.
--
-- This file defines no functions: a script that returns early needs none, and defining a function takes a quarter of a command's time.
local GROUP = 'workers'
local WAKE = 'wake' -- Only field of an entry in a lane that wakes the lane's worker: ms after which the worker checks for jobs.
local LATER = 'later' -- Value in a waiting key in place of an entry: the job is in the backlog.
local DONE = 'done' -- Value in a waiting key in place of an entry: the row was just stored.
-- Kinds of jobs: the field "p" of an entry, or ROWS if an entry has no such field. See "Priorities" in docs/design/queue.md.
local BULK, CONTINUED, ROWS = 'bulk', 'continued', ''
local MAX_WITH_ROWS = 64 -- A client with this number of unread messages in its reply stream gets messages without rows.
local MAX_CARRIED_BYTES = 65536 -- Max bytes of rows in one message.
local DIRECT = '+' -- Character before the host in the reply key of a client that reads rows from row servers of workers.
local jobs = KEYS[1]
local base = string.sub(jobs, 1, -6)
local backlog, sole_client, capacities = base .. ':backlog', base .. ':sole_client', base .. ':capacity'
local lanes, lane_of, deadlines = base .. ':lanes', base .. ':lane:', base .. ':workers'
local watcher = base .. ':watcher'
-- Prefixes of waiting keys (the clients that wait for a prompt), of reply keys, and of bulk clients' reply keys.
local waiting_for, replies, bulk_replies = base .. ':waiting:', base .. ':reply', base .. ':reply:bulk:'
local records = base .. ':partition:' -- Prefix of the keys with the partition in which clients wait for a prompt. See meet.lua.
