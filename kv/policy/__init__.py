"""What the store keeps and what goes: eviction, times-to-live, groups and admission, as pure policies over handles."""
