-- Register a client for prompts, and queue those that nobody asked for yet.
--
-- KEYS  jobs, reply key of the client, then per prompt: waiting key
--       and, if look is "rows", after all of those per prompt: row key
-- ARGV  queue limit, how long the client waits in ms, look ("rows"|"marks"|""), again (0|1),
--       then per prompt: encoded job
--
-- look: where to see that a row is in the cache: at the row itself, or at the mark that finish.lua has left of it where
-- rows are on other masters; nowhere when a row is to be replaced.
--
-- again: the caller has waited long; make sure that the job it waits for still exists.
--
-- A client that has much in the backlog leaves room in the queue for others: it may have so much there as SHARE times
-- what is free. So one client alone gets nine tenths of the limit, and whoever comes later always finds some room.
--
-- Returns one character per prompt: Q queued now, J joined a job that exists, F refused because the queue
-- is full, R the row is in the cache (it was stored after the client looked).
local SHARE = 9
local reply = KEYS[2]
local limit, lifetime = tonumber(ARGV[1]), tonumber(ARGV[2])
local look, again = ARGV[3], ARGV[4] == '1'
local count = #ARGV - 4
local depth, behind = redis.call('XLEN', jobs), count_at('ZCARD', backlog)
-- An empty stream has room for a prompt whoever reads it: a lone request is spared the look.
local free = depth == 0 and behind == 0 and 1 or nil
local time, now, last, more, is_alone = now_ms(), nil, nil, 0, false
if depth > 0 then
  free, more = room()
  local alone = free < 0 and redis.pcall('GET', flood)
  -- A server that is short of memory may have dropped the key: then it was somebody's.
  if free < 0 and alone ~= reply then
    redis.call('DEL', flood)
    back(-free, type(alone) == 'string' and alone or '?')
    depth, behind, free = redis.call('XLEN', jobs), count_at('ZCARD', backlog), 0
  end
end
-- What goes to the backlog, all at once in the end.
local head, later, stored = string.format('%d %d ', time, time + lifetime), {}, {}

-- The client's next turn.
local function next_turn()
  if not last then
    now = clock()
    -- The first turns are for those that may have to come back from the stream.
    last = math.max(now - math.min(0, free or 0), number_at(turns, reply))
  end
  return last + 1
end

local function queue(waiting, job)
  if depth + behind >= limit then
    return 'F'
  end
  if behind == 0 and not free then
    free, more = room()
  end
  if behind == 0 and free + more > 0 then
    if free <= 0 and not is_alone then
      redis.call('SET', flood, reply, 'PX', FLOOD_MS)
      is_alone = true
    end
    local digest = free <= 0 and string.sub(waiting, -16)
    redis.call('HSET', waiting, 'job', to_stream(job, time + lifetime, nil, digest), reply, '')
    depth, free = depth + 1, depth > 0 and free - 1 or nil
  else
    local turn = next_turn()
    if last - now >= SHARE * (limit - depth - behind) then
      return 'F'
    end
    local digest = string.sub(waiting, -16)
    later[#later + 1], later[#later + 2] = turn, digest
    stored[#stored + 1], stored[#stored + 2] = digest, head .. job
    redis.call('HSET', waiting, 'job', LATER, reply, '')
    last, behind = turn, behind + 1
  end
  return 'Q'
end

-- Who joins a prompt that waits for somebody else's turn may have an earlier one.
local function hasten(digest)
  local turn = redis.call('ZSCORE', backlog, digest)
  if turn and next_turn() < tonumber(turn) then
    redis.call('ZADD', backlog, last + 1, digest)
    last = last + 1
  end
end

local outcome = {}
for i = 1, count do
  local waiting = KEYS[2 + i]
  local row = KEYS[2 + count + i]
  local size = look == 'rows' and redis.pcall('STRLEN', row) or 0
  if type(size) == 'table' then
    -- Something else than a string: nobody could read it, and no row could be stored. Who may not write rows leaves
    -- it to the worker.
    redis.pcall('DEL', row)
    size = 0
  end
  if size > 0 then
    outcome[i] = 'R'
  else
    local job = redis.pcall('HGET', waiting, 'job')
    if type(job) == 'table' then
      -- No hash: nobody can be waiting there.
      redis.call('DEL', waiting)
      job = false
    end
    if job == DONE and (again or look ~= 'marks') or job and again and not is_queued(job, waiting) then
      job = false
    end
    if job == DONE then
      outcome[i] = 'R'
    elseif job then
      redis.call('HSET', waiting, reply, '')
      if job == LATER then
        hasten(string.sub(waiting, -16))
      end
      outcome[i] = 'J'
    else
      outcome[i] = queue(waiting, ARGV[4 + i])
    end
    -- As long as the most patient of those who wait.
    if outcome[i] == 'Q' or outcome[i] == 'J' and redis.call('PTTL', waiting) < lifetime then
      redis.call('PEXPIRE', waiting, lifetime)
    end
  end
end
if #later > 0 then
  to_backlog(later, stored)
end
if last then
  redis.call('HSET', turns, reply, last)
  move_up()
end
return table.concat(outcome)
