-- Read what a model's workers serve and what they are asked to load, at once.
--
-- KEYS  adapters, offers
--
-- Returns {fields and values of adapters, those of offers}.
return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
