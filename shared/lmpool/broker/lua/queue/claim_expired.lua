-- Claim jobs of workers that have been silent for a lease; the caller gives up jobs that are returned with too many deliveries.
--
-- KEYS  jobs, cursor (entry of the shared stream where the next call starts)
-- ARGV  consumer group, consumer, lease in ms, max deliveries of a job, max jobs to take, idle (0|1): the caller holds no job,
--       max bytes of a job, max bytes of all jobs together except the first, lifetime of the cursor in ms,
--       then entries that the caller is computing: they do not count as expired, even if the caller renews their leases late
--
-- A job may be the reason why its workers crashed. So for its last delivery a job is taken alone, by a worker that holds no other job.
-- One call visits the caller's lane, lanes of workers whose deadlines have passed, and a part of the held jobs of the shared stream.
-- This part starts at a cursor that all workers share, and one worker at a time claims. remove_gone.lua moves the jobs in a dead worker's
-- lane that were not delivered.
--
-- Returns {alone (0|1), list of jobs, number of calls to visit the rest of the held jobs}. alone: the list has
-- one job for its last delivery, or is empty and the caller must call again when it holds no job. A job is {entry, encoded job or its
-- size if too large, previous deliveries, fields "u", "t" and "p"}. A bulk prompt that an interactive client has joined has no "p".

-- include waiting
-- include time

local cursor, group, consumer, lease = KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_deliveries, is_idle = tonumber(ARGV[4]), ARGV[6] == '1'
local max_job_bytes, bytes_left = tonumber(ARGV[7]), tonumber(ARGV[8])
local MAX_SHORT = 64 -- Max bytes of a returned field "u", "t" or "p".
local MAX_TAKEN = 128 -- Max jobs that one call takes.
local MAX_LANES = 8 -- Max lanes of other workers that one call visits.
local MAX_CLIENTS = 32 -- Max clients of a bulk prompt that are checked for an interactive client.
local PART, FIRST = 500, '-' -- Max held jobs of a stream that one call visits. FIRST is Redis's name for the lowest id.
local most = math.min(tonumber(ARGV[5]), MAX_TAKEN)
local own, taken, is_alone, is_left, now = {}, {}, false, false, now_ms()
for at = 10, #ARGV do
  own[ARGV[at]] = true
end
local pending = group_at(jobs).pending

-- Whether an interactive client has joined a bulk prompt. submit.lua does not change the entry while a worker holds the job.
local function is_joined(lifetime)
  local waiting = waiting_for .. (string.match(lifetime, '^%d+ (.+)$') or '')
  local _, sole = read_waiting(waiting)
  for _, reply in ipairs(sole and {sole} or redis.pcall('HRANDFIELD', waiting, MAX_CLIENTS) or {}) do
    if string.sub(reply, 1, #replies) == replies and not is_bulk_client(reply) then
      return true
    end
  end
  return false
end

-- Claim an entry of a stream. Returns false if the job exceeds the bytes that are left.
local function take(stream, suffix, id, deliveries)
  local entry = redis.call('XRANGE', stream, id, id)[1]
  if not entry then
    -- The job ended or was cancelled, but is still pending.
    redis.call('XACK', stream, group, id)
    return true
  end
  local fields = {}
  for at = 1, #entry[2], 2 do
    fields[entry[2][at]] = entry[2][at + 1]
  end
  if fields[WAKE] then
    remove_entries({id .. suffix}, true)
    return true
  end
  local job = fields.m or ''
  bytes_left = bytes_left - #job
  if bytes_left < 0 and #taken > 0 then
    return false
  end
  redis.call('XCLAIM', stream, group, consumer, lease, id, 'JUSTID', 'RETRYCOUNT', deliveries + 1)
  fields.p = not (fields.p == BULK and is_joined(fields.u or '')) and fields.p
  local found = {id .. suffix, #job > max_job_bytes and #job or job, deliveries}
  for _, name in ipairs({'u', 't', 'p'}) do
    found[#found + 1] = fields[name] and #fields[name] <= MAX_SHORT and fields[name] or ''
  end
  taken[#taken + 1] = found
  return true
end

-- Claim the expired jobs in `held`, a reply of XPENDING. Returns the id where the next call starts; nil if all of `held` was visited.
local function take_expired(stream, suffix, held)
  for _, job in ipairs(held) do
    local id, deliveries = job[1], job[4]
    if job[3] >= lease and not (job[2] == consumer and own[id .. suffix]) then
      local is_last = deliveries == max_deliveries - 1
      if is_last and (#taken > 0 or not is_idle) then
        is_left = true -- Only a worker that holds no job may take this job.
      elseif not take(stream, suffix, id, deliveries) then
        return id
      end
      is_alone = is_last and #taken == 1 and taken[1][1] == id .. suffix
      if is_alone or #taken == most then
        return '(' .. id
      end
    end
  end
end

-- Claim the expired jobs in the lane of a worker. Returns whether this call must take no more jobs.
local function scan_lane(worker)
  local stream = lane_of .. worker
  local held = redis.pcall('XPENDING', stream, group, 'IDLE', lease, FIRST, '+', PART)
  return not held.err and take_expired(stream, ' ' .. worker, held) ~= nil
end

local function reply(calls)
  return {(is_alone or is_left and #taken == 0) and 1 or 0, taken, calls}
end

local is_full = scan_lane(consumer)
local gone = tonumber(redis.pcall('ZCOUNT', deadlines, '-inf', '(' .. now)) or 0
-- In a long list of lanes, begin at a place that changes with the time: other workers may be busy with the first lanes.
local begin = gone > MAX_LANES and now % gone or 0
for _, worker in ipairs(redis.pcall('ZRANGEBYSCORE', deadlines, '-inf', '(' .. now, 'LIMIT', begin, MAX_LANES)) do
  is_full = is_full or worker ~= consumer and scan_lane(worker)
end
if is_full then
  return reply(0)
end
local from = redis.pcall('GET', cursor)
from = type(from) == 'string' and string.match(from, '^%(?%d+%-%d+$') or FIRST
-- Visit a part of the held jobs of the shared stream. If the part ends with the last job and nothing was taken, visit the first part.
for _, first in ipairs(from == FIRST and {FIRST} or {from, FIRST}) do
  local held = redis.pcall('XPENDING', jobs, group, first, '+', PART)
  if held.err then
    -- XPENDING refuses a range that starts after the last possible id: start at the first id. The second call repeats any other error.
    held = redis.call('XPENDING', jobs, group, FIRST, '+', PART)
  end
  from = take_expired(jobs, '', held) or #held == PART and '(' .. held[PART][1] or FIRST
  if #taken > 0 or is_alone or from ~= FIRST then
    break
  end
end
redis.call('SET', cursor, from, 'PX', ARGV[9])
return reply(math.floor(pending / PART))
