-- Register a client for prompts, and place prompts that are not queued yet in lanes, the shared stream or the backlog.
--
-- KEYS  jobs, reply key of the client, waiting key of each prompt, and if row check is "rows": row key of each prompt
-- ARGV  queue limit, how long the client waits in ms,
--       row check: "rows" (are rows cached?), "marks" (did finish.lua leave marks?) or "" (compute each row, even if it is cached),
--       again (0|1): check that existing jobs are still queued; if the model has several partitions, a space and the number of this
--       one, to check that clients wait in no other partition; number of prompts, encoded job of each, then optionally home of each
--       (a worker that computed a prefix, "" for none, "=" if the prompt continues the same prompt as the previous one),
--       then for continuations the tokens that each may generate
--
-- Returns one character per prompt. Q: queued; J: joined an existing job; F: refused, the queue is full; R: the row is cached. Returns ''
-- and does nothing if clients may wait for a prompt in another partition.

-- include names

local reply, lifetime, row_check, again = KEYS[2], ARGV[2], ARGV[3], string.sub(ARGV[4], 1, 1) == '1'
local HEAD, limit, count = 5, tonumber(ARGV[1]), tonumber(ARGV[5])
local sole_waiter, partition = reply .. '\n', string.sub(ARGV[4], 3)
if partition ~= '' then
  local recorded_at = {}
  for i = 1, count do
    recorded_at[i] = records .. string.sub(KEYS[2 + i], -16)
  end
  for _, recorded in ipairs(redis.call('MGET', unpack(recorded_at))) do
    if recorded and recorded ~= partition then
      return ''
    end
  end
end
local existing = again and 1 or redis.call('EXISTS', backlog, unpack(KEYS, 3))
local depth = redis.call('XLEN', jobs) + math.max(0, tonumber(redis.pcall('ZSCORE', lanes, '')) or 0)
if #ARGV == HEAD + 1 and existing == 0 and limit > 0 and depth == 0 and redis.pcall('HLEN', capacities) == 2 then
  -- The case of one new prompt and one worker that waits comes first, because the client waits for nothing but this call.
  redis.call('SET', KEYS[3], sole_waiter .. redis.call('XADD', jobs, '*', 'm', ARGV[6], 'u', lifetime), 'PX', lifetime)
  return 'Q'
end

-- include strings
-- include lanes

local SOLE_EXTRA = 1200 -- Max jobs of a sole client beyond the capacity: fair_queue.lua can move this number of jobs back in one call.
local SOLE_MAX_BYTES = 2048 -- Max bytes of each job beyond the capacity, because fair_queue.lua moves a limited number of bytes.
local SOLE_MS = 3600000 -- Lifetime of the key that names the sole client, in ms.
local SPARE_BATCHES = 2 -- Batches per worker that may wait or be computed without a check of the backlog.
local is_bulk, sole = string.find(reply, bulk_replies, 1, true) ~= nil, redis.pcall('GET', sole_client)
local first_cost = HEAD + 2 * count
local is_continued = #ARGV > first_cost
-- `outcome`: outcome per prompt. `fresh`: waiting keys and values to set. `is_done`: waiting key -> outcome if its prompt occurs again.
local outcome, fresh, is_done = {}, {}, {}
local homes, is_sibling = {}, {}
for i = 1, math.min(count, #ARGV - HEAD - count) do
  homes[i] = ARGV[HEAD + count + i]
  if homes[i] == '=' and i > 1 then
    homes[i], is_sibling[i] = homes[i - 1], true
  end
end

local function set_fresh()
  if not set_together(fresh, lifetime) then
    for at = 1, #fresh, 2 do
      local waiting = fresh[at]
      redis.call('SET', waiting, fresh[at + 1], 'PX', lifetime)
    end
  end
end

-- Add a new prompt to the lane of a worker, or to the shared stream if `worker` is nil. Returns the entry of its job. Jobs that may have to
-- move to another stream or to the backlog need a tag with the digest.
local function add(i, worker, kind, needs_digest)
  local tag, home = lifetime, homes[i]
  if worker or needs_digest then
    tag = lifetime .. ' ' .. string.sub(KEYS[2 + i], -16)
  end
  if home and home ~= '' then
    return add_job(worker, kind, 'm', ARGV[HEAD + i], 'u', tag, 'h', home)
  end
  return add_job(worker, kind, 'm', ARGV[HEAD + i], 'u', tag)
end

-- Nearly always all prompts are new and fit into the streams. Defining the functions for other cases takes as long as a few prompts.
if existing == 0 and not is_continued and worker_count > 0 then
  local is_alone = sole == reply and not is_bulk and not has_lanes
  local most = is_alone and SOLE_EXTRA or SPARE_BATCHES * (tonumber(redis.pcall('HGET', capacities, '')) or 0)
  local fits = depth + count <= math.min(limit, most)
  for i = HEAD + 1, fits and is_alone and #ARGV or 0 do
    fits = fits and #ARGV[i] <= SOLE_MAX_BYTES
  end
  local announced = fits and open_lanes(count, homes)
  for i = 1, fits and count or 0 do
    local waiting = KEYS[2 + i]
    outcome[i] = is_done[waiting] or 'Q'
    if not is_done[waiting] then
      fresh[#fresh + 1] = waiting
      fresh[#fresh + 1] = sole_waiter
        .. add(i, choose(homes[i] or '', announced[i], is_sibling[i]), is_bulk and BULK, is_alone or is_bulk)
      is_done[waiting] = 'J'
    end
  end
  if fits then
    set_fresh()
    count_added()
    if is_alone and redis.call('PTTL', sole_client) < SOLE_MS / 2 then
      redis.call('SET', sole_client, reply, 'PX', SOLE_MS)
    end
    return table.concat(outcome)
  end
end

-- include fair_queue

-- Max prompts of one client in the backlog per free slot of the queue, so that other clients always find free slots.
local SHARE = 9
local kind = is_bulk and BULK or is_continued and CONTINUED or nil
-- Member of "virtual_time" whose score is the start time of the client's last prompt of this kind.
local member = kind == CONTINUED and reply .. TOKENS or reply
local in_backlog, spare = count_at('ZCARD', backlog), nil
-- If all prompts are new, no prompt needs a check of its own.
local is_new = not again and existing == (in_backlog > 0 and 1 or 0)
spare, depth = spare_capacity()
if spare[BULK] < 0 or is_bulk then
  -- A bulk client gives way to all other clients, an interactive client to interactive clients only.
  local excess = is_bulk_client(sole) and -spare[BULK] or is_bulk and 0 or -spare[ROWS]
  if sole ~= reply and sole ~= GAVE_WAY and excess > 0 then
    give_way(excess, sole)
    in_backlog, spare, depth = count_at('ZCARD', backlog), spare_capacity()
  end
end
local free = sole == reply and spare[kind or ROWS] or math.max(0, spare[kind or ROWS])
-- Max jobs of the client beyond the capacity, if it is the sole client; 0 for continuations, which take too long.
local may_be_alone = not is_bulk or sole == reply or spare[BULK] >= 0 and sole ~= GAVE_WAY
local extra = worker_count > 0 and not is_continued and may_be_alone and SOLE_EXTRA or 0
-- Number of prompts in the backlog that go before the prompts of this client.
local ahead = in_backlog
if ahead > 0 and not is_bulk then
  ahead = in_backlog - count_of(BULK) - (is_continued and 0 or count_of(CONTINUED))
end
local announced = open_lanes(count, is_new and ahead == 0 and free + extra >= count and homes or {})
-- `order`, `stored`: see `to_backlog`. `has_others`: waiting key -> whether other clients wait. `last`: the client's last start time.
local order, stored, has_others, is_named, now, last = {}, {}, {}, false, nil, nil

-- The virtual start time of the client's next prompt, and the tokens that the prompt may generate (1 for a row). The first start times
-- stay free for the client's jobs beyond the capacity, which may have to move back to the backlog.
local function next_start(i)
  if not last then
    now = virtual_now(kind)
    last = math.max(now - math.min(0, free), start_of(member))
  end
  local cost = is_continued and math.max(1, tonumber(ARGV[first_cost + i]) or 1) or 1
  return last + cost, cost
end

local function queue(i)
  local waiting, job, home, entry = KEYS[2 + i], ARGV[HEAD + i], homes[i] or '', LATER
  if depth + in_backlog >= limit then
    return 'F'
  elseif ahead == 0 and (free > 0 or free + extra > 0 and #job <= SOLE_MAX_BYTES) then
    if free <= 0 and not is_named then
      redis.call('SET', sole_client, reply, 'PX', SOLE_MS)
      is_named = true
    end
    entry = add(i, choose(home, announced[i], is_sibling[i]), kind, free <= 0 or is_bulk)
    depth, free = depth + 1, free - 1
  else
    local start, cost = next_start(i)
    -- (last - now) / cost: prompts of the client in the backlog, if all have this cost.
    if (last - now) / cost >= SHARE * (limit - depth - in_backlog) then
      return 'F'
    end
    order[#order + 1], order[#order + 2] = start, string.sub(waiting, -16)
    stored[#stored + 1] = order[#order]
    stored[#stored + 1] = to_store(string.format('%d', now_ms()), lifetime, home, job, is_continued and cost or nil)
    last, in_backlog, ahead = start, in_backlog + 1, ahead + 1
  end
  if has_others[waiting] then
    redis.call('HSET', waiting, 'job', entry, reply, '')
    redis.call('PEXPIRE', waiting, lifetime)
  else
    fresh[#fresh + 1], fresh[#fresh + 2] = waiting, sole_waiter .. entry
  end
  return 'Q'
end

-- An interactive client joins a bulk prompt in a stream: make the prompt interactive, unless a worker holds it.
local function promote(entry)
  local stream, id, worker = locate(entry)
  local found = redis.pcall('XRANGE', stream, id, id)[1]
  local job = type(found) == 'table' and read_entry(found, worker and ' ' .. worker or '')
  if job and job.kind == BULK and job.digest and #redis.pcall('XPENDING', stream, GROUP, id, id, 1) == 0 then
    job.kind = kind
    move(worker, {job})
  end
end

-- Whether the row is cached for this client: a row in shared memory counts only if the reply key names the same host, or if the client
-- reads from row servers and the reference has the address of one (version 2).
local function is_cached(row)
  local head = row_check == 'rows' and redis.pcall('GETRANGE', row, 0, 20) or ''
  if type(head) == 'table' then
    -- No row can be stored over a value of another type, so remove the value. If this client may not remove it, a worker does.
    redis.pcall('UNLINK', row)
    return false
  end
  if head == '' or string.sub(head, 1, 4) ~= 'LMPS' or string.sub(head, 6, 21) == string.sub(reply, -16) then
    return head ~= ''
  end
  return string.byte(head, 5) == 2 and string.sub(reply, -17, -17) == DIRECT
end

-- Join an existing job. Returns J; R if the job has just ended with a row; nil if there is no job.
local function join(i, waiting)
  local job, waiter = read_waiting(waiting)
  if not job or job == DONE then
    return job and not again and row_check == 'marks' and 'R' or nil
  end
  if waiter and waiter ~= reply then
    expand(waiting, job, waiter)
  end
  if again and not is_queued(job, waiting) then
    has_others[waiting] = waiter ~= reply
    return nil
  end
  if waiter ~= reply then
    redis.call('HSET', waiting, reply, '')
  end
  if job == LATER then
    -- A prompt of another client in the backlog moves to the start time of this client, if this start time is earlier.
    local digest = string.sub(waiting, -16)
    local start = tonumber(redis.call('ZSCORE', backlog, digest))
    if start and next_start(i) < start then
      last = next_start(i)
      redis.call('ZADD', backlog, last, digest)
    end
  elseif waiter and not is_bulk and is_bulk_client(waiter) then
    promote(job)
  end
  -- The waiting key lives as long as the most patient client waits.
  if redis.call('PTTL', waiting) < tonumber(lifetime) then
    redis.call('PEXPIRE', waiting, lifetime)
  end
  return 'J'
end

for i = 1, count do
  local waiting = KEYS[2 + i]
  outcome[i] = is_done[waiting]
  if not outcome[i] then
    outcome[i] = not is_new and (is_cached(KEYS[2 + count + i]) and 'R' or join(i, waiting)) or queue(i)
    is_done[waiting] = outcome[i] == 'Q' and 'J' or outcome[i]
  end
end
set_fresh()
count_added()
if #order > 0 then
  to_backlog(order, stored)
end
if last then
  redis.call('ZADD', virtual_time, last, member)
  move_up()
end
-- The queue of a model that has lost its workers expires, and keys that this call has created expire with it.
local left = worker_count == 0 and redis.call('PTTL', jobs) or -1
for _, key in ipairs(left > 0 and {backlog, backlog_jobs, virtual_time} or {}) do
  redis.call('PEXPIRE', key, left)
end
return table.concat(outcome)
