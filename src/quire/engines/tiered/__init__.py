"""KV that outlives the pool: the base of engines that keep blocks in tiers.

opening    a stack of tiers from what people write
weights    what KV is of: contents of weights and adapters, never their names
record_form  keys, seals and headers of records, of other engines too
pages      records that an engine names by hashes, and the tiers that have them
parts      which bytes of a block go into one record
search     which of a prompt's blocks the tiers have, and how much of it is of use; of other engines too
cost       what computing a prompt takes, learned from what it took
naming     what keys stand for, beside the records
offloading blocks that a background thread copies, held until then
store      TieredStore: prefixes come back before a request opens, blocks go down after it
saved      a whole cache as a directory

Knows no model library: an engine brings a manager, pools, and a name of what computed them. Needs the extra
`tiers`; importing the package alone does not.
"""
