def get_group_rank_size(group):
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)
