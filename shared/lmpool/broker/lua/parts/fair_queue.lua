-- The order of a model's prompts, for the scripts that include it. See "Fair queueing" and "Priorities" in docs/design/queue.md.
--
-- The server serves no other client while a script runs, so each call moves a bounded number of prompts.

-- include moving

-- Max jobs and bytes that move back when a client that asked alone has to give way: a little more than it may have (submit.lua). Max
-- bytes of the jobs that one call moves up.
local MAX_BACK, MAX_BYTES_BACK, MAX_MOVED_BYTES = 1300, 1300 * 2048, 524288
-- Values of sole_client: a client had to give way recently; the server has lost the name. How long no bulk client counts as alone
-- after one gave way, in ms: as long as workers expect interactive prompts (QUIET_S).
local GAVE_WAY, UNKNOWN, GAVE_WAY_MS = '', '?', 60000
-- First virtual start time of each kind, and the end of its range. Lua writes 14 digits exactly.
local FROM = {[ROWS] = -math.huge, [CONTINUED] = 1e11, [BULK] = 1e12}
local TO = {[ROWS] = '(' .. FROM[CONTINUED], [CONTINUED] = '(' .. FROM[BULK], [BULK] = '+inf'}
-- Of every TURNS jobs that end, one is followed by a job of each kind that yields, however full the streams are. Max jobs that must end
-- before the next turn: those for a continuation of 8,192 tokens.
local TURNS, MAX_OWED = 16, 8192 * 16
-- Members of "virtual_time": jobs that count towards the next turn; suffix of reply keys for continuations. See keys.py.
local OWED, TOKENS = {[CONTINUED] = 'owed:continued', [BULK] = 'owed'}, ':tokens'
local backlog_jobs, virtual_time = base .. ':backlog:jobs', base .. ':virtual_time'

-- The reply of a command that counts at a key; a value of another type is removed.
local function count_at(command, key)
  local count = redis.pcall(command, key)
  if type(count) == 'table' then
    redis.call('UNLINK', key)
    return 0
  end
  return count
end

-- A start time in "virtual_time"; 0 if it is no finite number.
local function start_of(member)
  local start = tonumber(redis.call('ZSCORE', virtual_time, member) or 0)
  return start - start == 0 and start or 0
end

-- The virtual time of a kind: the start time of the prompt that moved up last.
local function virtual_now(kind)
  count_at('ZCARD', virtual_time)
  return math.max(0, FROM[kind or ROWS], start_of(kind or ROWS))
end

-- How many prompts of a kind the backlog has.
local function count_of(kind)
  return redis.call('ZCOUNT', backlog, FROM[kind], TO[kind])
end

-- Add to the backlog: start times and digests in turns, and digests and stored jobs in turns.
local function to_backlog(order, stored)
  count_at('HLEN', backlog_jobs)
  redis.call('ZADD', backlog, unpack(order))
  redis.call('HSET', backlog_jobs, unpack(stored))
end

-- A job as the backlog stores it. `cost` is nil, or the tokens that a continuation may generate.
local function to_store(since, lifetime, home, job, cost)
  return since .. (cost and ',' .. cost or '') .. ' ' .. lifetime .. ' ' .. home .. ' ' .. job
end

-- Returns since, cost or '', lifetime, home, and where the job begins; nothing if it is no stored job.
local function read_stored(stored)
  return string.match(stored or '', '^(%d+),?(%d*) (%d+) (%S*) ()')
end

-- If no client has anything in the backlog, virtual time can start again. Returns whether that is so.
local function is_backlog_empty()
  local is_empty = redis.call('EXISTS', backlog) == 0
  if is_empty then
    redis.call('UNLINK', virtual_time, backlog_jobs)
  end
  return is_empty
end

-- Have the client that asked alone give way: move the last `excess` jobs of the streams back to the backlog, as many of each lane,
-- with the client's first start times. Only its kind moves, rows or bulk prompts; both if the server has lost its name.
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
    -- The client's prompts that were in the backlog before start later.
    redis.call('ZADD', virtual_time, math.max(order[1], start_of(client)), client)
  end
  if #order == 0 or seen >= excess then
    redis.call('SET', sole_client, GAVE_WAY, 'PX', GAVE_WAY_MS)
  else
    -- The next submission moves more.
    redis.call('UNLINK', sole_client)
  end
end

-- Whether the job of a prompt is still in the queue. Something else than a stream has no jobs.
local function is_queued(job, waiting)
  if job == LATER then
    return redis.call('ZSCORE', backlog, string.sub(waiting, -16)) and true or false
  end
  local stream, id = locate(job)
  return #redis.pcall('XRANGE', stream, id, id) > 0
end

-- Take a prompt out of the backlog. `client` most likely queued it, and gets its turn back. Returns whether it was there.
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

-- Move up to `free` prompts of a kind to the streams, and drop abandoned ones. Returns the tokens beyond one each that they generate.
local function move_kind(kind, free, budget)
  local added, tokens, now = 0, 0, now_ms()
  while added < free and budget.count > 0 and budget.bytes > 0 do
    -- Take out the first prompts: one, or as many as the budget has bytes for.
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
      -- A cancelled prompt has left the backlog, so before its deadline a prompt is waited for.
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

-- Move prompts up while the streams have capacity, after `ended` jobs have ended. Returns whether the next call may move more.
local function move_up(ended)
  local in_backlog = count_at('ZCARD', backlog)
  if in_backlog == 0 then
    return false
  end
  count_at('HLEN', backlog_jobs)
  count_at('ZCARD', virtual_time)
  local limits, has_turns, counts = spare_capacity(), {}, {[CONTINUED] = count_of(CONTINUED), [BULK] = count_of(BULK)}
  local planned = math.max(0, math.min(limits[ROWS], in_backlog - counts[CONTINUED] - counts[BULK]))
  for _, kind in ipairs({CONTINUED, BULK}) do
    limits[kind] = counts[kind] > 0 and limits[kind] - planned or 0
    if counts[kind] > 0 and limits[kind] <= 0 then
      -- The streams are full. Some prompts of this kind may move up all the same, after so many jobs have ended.
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
  return not is_backlog_empty() and (budget.count <= 0 or budget.bytes <= 0)
end
