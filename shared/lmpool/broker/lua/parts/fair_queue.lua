-- Move a model's prompts in a fair order from the backlog to the streams, and back; other scripts include this file. See "Fair
-- queueing" and "Priorities" in docs/design/queue.md.
--
-- Sole client: a client that alone has prompts in the queue, and may have jobs beyond the capacity of the streams.
-- The server serves no other client while a script runs, so each call moves a bounded number of prompts.

-- include moving

local MAX_BACK = 1300 -- Max jobs that one call moves back: a little more than a sole client may have beyond the capacity (submit.lua).
local MAX_BYTES_BACK = 1300 * 2048 -- Max bytes of the jobs that one call moves back from the streams to the backlog.
local MAX_MOVED_BYTES = 524288 -- Max bytes of the jobs that one call moves from the backlog to the streams.
local GAVE_WAY = '' -- Value of the key sole_client for GAVE_WAY_MS after the sole client had to give way.
local UNKNOWN = '?' -- Stands for the reply key of an unknown client: the server has lost the key that names the client.
local GAVE_WAY_MS = 60000 -- Ms after a client gave way in which no bulk client counts as the sole client; as long as workers' QUIET_S.
-- First virtual start time of each kind, and the end of its range. Larger numbers would lose digits: Lua writes 14 digits exactly.
local FROM = {[ROWS] = -math.huge, [CONTINUED] = 1e11, [BULK] = 1e12}
local TO = {[ROWS] = '(' .. FROM[CONTINUED], [CONTINUED] = '(' .. FROM[BULK], [BULK] = '+inf'}
-- After every TURNS jobs that end, one job of each yielding kind (CONTINUED, BULK) moves to the streams, even if the streams are full.
local TURNS = 16
local MAX_OWED = 8192 * 16 -- Max jobs that must end before the next turn of a kind: enough for a continuation of 8,192 tokens.
local OWED = {[CONTINUED] = 'owed:continued', [BULK] = 'owed'} -- Members of "virtual_time": number of ended jobs since the last turn.
local TOKENS = ':tokens' -- Suffix of a reply key in "virtual_time", for the client's continuations. See protocol/keys.py.
local backlog_jobs, virtual_time = base .. ':backlog:jobs', base .. ':virtual_time'

-- Run a command that returns a number for a key, such as ZCARD. A value of another type is removed and counts as 0.
local function count_at(command, key)
  local count = redis.pcall(command, key)
  if type(count) == 'table' then
    redis.call('UNLINK', key)
    return 0
  end
  return count
end

-- The score of a member of "virtual_time"; 0 if the score is no finite number.
local function start_of(member)
  local start = tonumber(redis.call('ZSCORE', virtual_time, member) or 0)
  return start - start == 0 and start or 0
end

-- The virtual time of a kind: the start time of the prompt of this kind that moved to the streams last.
local function virtual_now(kind)
  count_at('ZCARD', virtual_time)
  return math.max(0, FROM[kind or ROWS], start_of(kind or ROWS))
end

local function count_of(kind)
  return redis.call('ZCOUNT', backlog, FROM[kind], TO[kind])
end

-- Add prompts to the backlog. `order` alternates start times and digests; `stored` alternates digests and stored jobs.
local function to_backlog(order, stored)
  count_at('HLEN', backlog_jobs)
  redis.call('ZADD', backlog, unpack(order))
  redis.call('HSET', backlog_jobs, unpack(stored))
end

-- A job in the form that the backlog stores. `cost` is nil, or the number of tokens that a continuation may generate.
local function to_store(since, lifetime, home, job, cost)
  return since .. (cost and ',' .. cost or '') .. ' ' .. lifetime .. ' ' .. home .. ' ' .. job
end

-- Split a stored job. Returns since, cost or '', lifetime, home, and the index where the job begins; nil if `stored` is no stored job.
local function read_stored(stored)
  return string.match(stored or '', '^(%d+),?(%d*) (%d+) (%S*) ()')
end

-- Returns whether the backlog is empty. If the backlog is empty, the virtual time starts again.
local function is_backlog_empty()
  local is_empty = redis.call('EXISTS', backlog) == 0
  if is_empty then
    redis.call('UNLINK', virtual_time, backlog_jobs)
  end
  return is_empty
end

-- Make the sole client give way: move the last `excess` jobs of the streams back to the backlog, about as many from each lane. The jobs
-- start right after the virtual time. Only jobs of the client's kind move, rows or bulk prompts; both kinds if the client is unknown.
local function give_way(excess, sole)
  local client = type(sole) == 'string' and sole or UNKNOWN
  local kind = is_bulk_client(client) and BULK or nil
  local start = {[ROWS] = virtual_now(), [BULK] = virtual_now(BULK)}
  local order, stored, seen, most = {}, {}, 0, math.min(excess, MAX_BACK)
  bytes_left = MAX_BYTES_BACK
  local function move_back(worker, count)
    local entries = {}
    for _, job in ipairs(find_to_move(worker, count, true)) do
      local can_move = job.digest and job.kind ~= CONTINUED and (client == UNKNOWN or job.kind == kind)
      -- A bulk prompt that an interactive client has joined must not wait among bulk prompts.
      if can_move and (not job.kind or is_bulk_client((select(2, read_waiting(waiting_for .. job.digest))))) then
        entries[#entries + 1] = job.entry
        order[#order + 1], order[#order + 2] = start[job.kind or ROWS] + excess - seen, job.digest
        stored[#stored + 1], stored[#stored + 2] = job.digest, to_store(job.since, job.lifetime, job.home, job.job)
        place(waiting_for .. job.digest, LATER, job.lifetime)
      end
      seen = seen + 1
    end
    remove_entries(entries)
  end
  move_back(nil, most)
  local workers = longest_lanes()
  for number, worker in ipairs(workers) do
    move_back(worker, math.ceil((most - seen) / (#workers - number + 1)))
  end
  if #order > 0 then
    to_backlog(order, stored)
    -- The client's next prompt starts after the jobs that moved back, and after the prompts that the client had in the backlog before.
    redis.call('ZADD', virtual_time, math.max(order[1], start_of(client)), client)
  end
  if #order == 0 or seen >= excess then
    redis.call('SET', sole_client, GAVE_WAY, 'PX', GAVE_WAY_MS)
  else
    -- Jobs beyond the capacity are left in the streams: the next submission moves more of these jobs back to the backlog.
    redis.call('UNLINK', sole_client)
  end
end

-- Whether the job of a prompt is still in the queue. A key that holds something else than a stream has no jobs.
local function is_queued(job, waiting)
  if job == LATER then
    return redis.call('ZSCORE', backlog, string.sub(waiting, -16)) and true or false
  end
  local stream, id = locate(job)
  return #redis.pcall('XRANGE', stream, id, id) > 0
end

-- Remove a prompt from the backlog, and give the turn back to `client`, its likely owner. Returns whether the prompt was removed.
local function drop_later(digest, client)
  local start = tonumber(redis.call('ZSCORE', backlog, digest))
  if not start then
    return false
  end
  local _, cost = read_stored(start >= FROM[CONTINUED] and redis.call('HGET', backlog_jobs, digest))
  redis.call('ZREM', backlog, digest)
  redis.call('HDEL', backlog_jobs, digest)
  client = client .. (start >= FROM[CONTINUED] and start < FROM[BULK] and TOKENS or '')
  if count_at('ZCARD', virtual_time) > 0 and redis.call('ZSCORE', virtual_time, client) then
    redis.call('ZINCRBY', virtual_time, -(tonumber(cost) or 1), client)
  end
  return true
end

-- Move up to `free` prompts of a kind to the streams; drop abandoned prompts. Returns the tokens to generate beyond one per prompt.
local function move_kind(kind, free, budget)
  local added, tokens, now = 0, 0, now_ms()
  while added < free and budget.count > 0 and budget.bytes > 0 do
    -- Select the first prompts of the backlog: at least one, and as many as the budget has bytes for.
    local digests, count = {}, math.min(free - added, budget.count)
    for _, digest in ipairs(redis.call('ZRANGEBYSCORE', backlog, FROM[kind], TO[kind], 'LIMIT', 0, count)) do
      budget.bytes = budget.bytes - redis.call('HSTRLEN', backlog_jobs, digest)
      if #digests > 0 and budget.bytes < 0 then
        break
      end
      digests[#digests + 1] = digest
    end
    if #digests == 0 then
      break
    end
    budget.count = budget.count - #digests
    redis.call('ZADD', virtual_time, redis.call('ZSCORE', backlog, digests[#digests]), kind)
    local stored = redis.call('HMGET', backlog_jobs, unpack(digests))
    redis.call('HDEL', backlog_jobs, unpack(digests))
    redis.call('ZREM', backlog, unpack(digests))
    for i, digest in ipairs(digests) do
      local waiting = waiting_for .. digest
      local since, cost, lifetime, home, at = read_stored(stored[i])
      local deadline = at and since + lifetime
      -- Cancelling a prompt removes it from the backlog, so a client waits for each prompt here until the prompt's deadline.
      if at and (now < deadline or is_wanted(waiting, deadline, now)) then
        local tag, job = lifetime .. ' ' .. digest, string.sub(stored[i], at)
        local priority = kind ~= ROWS and kind or nil
        place(waiting, add_job(choose(home), priority, 'm', job, 'u', tag, 't', since, 'h', home), lifetime)
        added, tokens = added + 1, tokens + (tonumber(cost) or 1) - 1
      else
        redis.call('UNLINK', waiting)
      end
    end
  end
  return tokens
end

-- Fill the streams from the backlog, after `ended` jobs have ended. While no worker takes jobs, prompts stay in the backlog. Otherwise up
-- to WITHOUT_WORKERS prompts of one client would go before prompts that other clients submit later.
local function move_up(ended)
  local in_backlog = count_at('ZCARD', backlog)
  if in_backlog == 0 or worker_count == 0 then
    return
  end
  count_at('HLEN', backlog_jobs)
  count_at('ZCARD', virtual_time)
  local limits, has_turns, counts = spare_capacity(), {}, {[CONTINUED] = count_of(CONTINUED), [BULK] = count_of(BULK)}
  local planned = math.max(0, math.min(limits[ROWS], in_backlog - counts[CONTINUED] - counts[BULK]))
  for _, kind in ipairs({CONTINUED, BULK}) do
    limits[kind] = counts[kind] > 0 and limits[kind] - planned or 0
    if counts[kind] > 0 and limits[kind] <= 0 then
      -- The streams are full. One prompt of this kind per TURNS ended jobs may move to the streams nevertheless.
      local owed = math.max(-MAX_OWED, start_of(OWED[kind])) + (ended or 0)
      limits[kind], has_turns[kind] = math.max(0, math.floor(owed / TURNS)), true
      limits[ROWS] = limits[ROWS] - limits[kind]
      redis.call('ZADD', virtual_time, owed < 0 and owed or owed % TURNS, OWED[kind])
    end
    planned = planned + math.min(limits[kind], counts[kind])
  end
  local budget = {count = MAX_MOVED, bytes = MAX_MOVED_BYTES}
  if planned > 0 then
    open_lanes(math.min(planned, MAX_MOVED), {})
    for _, kind in ipairs({ROWS, CONTINUED, BULK}) do
      local tokens = move_kind(kind, limits[kind], budget)
      if has_turns[kind] and tokens > 0 then
        redis.call('ZINCRBY', virtual_time, -TURNS * tokens, OWED[kind])
      end
    end
    count_added()
  end
  is_backlog_empty() -- The virtual time starts again with an empty backlog.
end
