-- Take over jobs whose worker has been silent for a lease.
--
-- KEYS  jobs
-- ARGV  consumer group, consumer, lease in ms, deliveries a job may have, most jobs to take,
--       idle (0|1): the caller holds no job, and if not the usual ones: most bytes of a job, most bytes of all jobs together
--
-- A job that was delivered often is suspected of killing workers. For its last delivery it is taken alone,
-- by a worker that holds nothing else, so that it cannot take others down with it; after that it is handed
-- over as spent, to be given up.
--
-- Returns {alone (0|1), list of {entry id, encoded job, deliveries before this one, fields 'u' and 't' or ''}}. An empty
-- list with alone = 1 asks the caller to come back when it holds nothing. A job that is too large is told by its size alone.
local jobs, group, consumer, lease = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local most, want, idle = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local largest, room = tonumber(ARGV[7] or '16777216'), tonumber(ARGV[8] or '67108864')
local MOST_SHORT = 64
local taken = {}
local function field(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then
      return fields[at + 1]
    end
  end
  return ''
end
local function short(value)
  return #value <= MOST_SHORT and value or ''
end
for _, silent in ipairs(redis.call('XPENDING', jobs, group, 'IDLE', lease, '-', '+', want)) do
  local id, deliveries = silent[1], silent[4]
  local alone = deliveries == most - 1
  if alone and #taken == 0 and not idle then
    return {1, taken}
  end
  if not (alone and #taken > 0) then
    local entry = redis.call('XRANGE', jobs, id, id)[1]
    if entry then
      local job = field(entry[2], 'm')
      room = room - #job
      if #job > largest then
        job, room = #job, room + #job
      end
      if room < 0 and #taken > 0 then
        break
      end
      redis.call('XCLAIM', jobs, group, consumer, lease, id, 'JUSTID', 'RETRYCOUNT', deliveries + 1)
      taken[#taken + 1] = {id, job, deliveries, short(field(entry[2], 'u')), short(field(entry[2], 't'))}
      if alone then
        return {1, taken}
      end
    else
      -- The entry was deleted while it was pending: nothing is left to do.
      redis.call('XACK', jobs, group, id)
    end
  end
end
return {0, taken}
